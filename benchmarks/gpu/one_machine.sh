#!/usr/bin/env bash
# Run benchmarks/gpu/run_all.py on a bare machine with a GPU, without network:
#
#   bash benchmarks/gpu/one_machine.sh --mpi ompi-cuda.tar.xz --wheels wheels --output out
#
# The machine has python3 with CuPy, NumPy, h5py, mpi4py >= 4.1 and pytest.
#   --mpi ARCHIVE    an MPI library to unpack and use, as build_cuda_mpi.sh packs it;
#                    without it, the one that mpi4py finds
#   --wheels FOLDER  wheels of what Python lacks (optree, deflate, tqdm, pytest-mpi, ...);
#                    all of them are installed, into a temporary folder
#   --output FOLDER  for the results and a log (default: gpu-results)
# Other options go to run_all.py, such as --minutes 8 or --quick.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
archive='' wheels='' output=gpu-results others=()
while (($#)); do
    case $1 in
        --mpi | --wheels | --output)
            (($# > 1)) || { echo "$1 needs a value" >&2; exit 2; }
            case $1 in
                --mpi) archive=$2 ;;
                --wheels) wheels=$2 ;;
                --output) output=$2 ;;
            esac
            shift 2
            ;;
        -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit ;;
        *) others+=("$1"); shift ;;
    esac
done
[[ -z $archive || -f $archive ]] || { echo "there is no file $archive" >&2; exit 2; }
[[ -z $wheels || -d $wheels ]] || { echo "there is no folder $wheels" >&2; exit 2; }

say() { printf '\n== %4ds  %s\n' "$SECONDS" "$*"; }

unpack() { # ARCHIVE FOLDER
    mkdir -p "$2"
    # Python can unpack what tar cannot, where xz is missing
    tar -C "$2" -xf "$1" 2>/dev/null || python3 - "$1" "$2" <<'PYTHON'
import sys, tarfile
tarfile.open(sys.argv[1]).extractall(sys.argv[2])
PYTHON
}

use_mpi() { # ARCHIVE FOLDER: make mpi4py and this shell find what is in the archive
    unpack "$1" "$2" || return
    local mpirun prefix
    mpirun=$(find "$2" -path '*/bin/mpirun' -print -quit)
    [[ -n $mpirun ]] || { echo "there is no bin/mpirun in $1"; return 1; }
    prefix=${mpirun%/bin/mpirun}
    export OPAL_PREFIX=$prefix PRTE_PREFIX=$prefix PMIX_PREFIX=$prefix
    export PATH=$prefix/bin:$PATH MPI4PY_LIBMPI=$prefix/lib/libmpi.so.40
    # What the archive knows better
    # shellcheck disable=SC1091
    [[ ! -f $prefix/env.sh ]] || . "$prefix/env.sh"
}

install_wheels() { # FOLDER TARGET: one by one, so that one that does not fit spoils none
    local wheel
    for wheel in "$1"/*.whl; do
        PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 \
            python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir \
            --upgrade --target "$2" "$wheel" || echo "$wheel could not be installed"
    done
    export PYTHONPATH=$2${PYTHONPATH:+:$PYTHONPATH}
}

main() {
    local status
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PYTHONUNBUFFERED=1
    if [[ -n $archive ]]; then
        say "unpack $archive"
        use_mpi "$archive" "$work/mpi" || return
    fi
    if [[ -n $wheels ]]; then
        say "install wheels of $wheels"
        install_wheels "$wheels" "$work/site"
    fi
    say 'what there is'
    nvidia-smi 2>&1 | head -15
    python3 --version
    PYTHONPATH=$here/../..${PYTHONPATH:+:$PYTHONPATH} python3 -c '
import mpi4py.MPI, cupy, h5py, numpy, pytest, mpidist
print(mpi4py.MPI.Get_library_version().splitlines()[0])
for m in (mpidist, cupy, numpy, h5py, mpi4py, pytest):
    print(m.__name__, m.__version__)' || return
    say 'run_all.py'
    python3 "$here/run_all.py" --output "$output" ${others[@]+"${others[@]}"}
    status=$?
    say "done, with status $status"
    return $status
}

mkdir -p "$output" || exit
work=$(mktemp -d) || exit
trap 'rm -rf "$work"' EXIT
(main) 2>&1 | tee "$output/one-machine.log"
exit "${PIPESTATUS[0]}"
