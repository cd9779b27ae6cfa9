"""What one processor writes, another reads; `.ci/versions aarch64` exchanges it."""

import portable_files


def test_files_are_read_as_they_were_written(strategy, mpi_tmp_path):
    portable_files.write(strategy, mpi_tmp_path)
    portable_files.read(strategy, mpi_tmp_path)
