#!/usr/bin/env bash
# Run benchmarks/gpu/run_all.py on a bare machine with a GPU, without network:
#
#   bash benchmarks/gpu/one_machine.sh --mpi ompi-cuda.tar.xz --wheels wheels --output out
#
# The machine has python3 with CuPy, NumPy, h5py, mpi4py >= 4.1 and pytest >= 9; mpi4py
# and pytest may be among the wheels. A call takes at most 10 minutes. So call it again
# until it says that nothing is left: results in the output folder tell what was done. If
# each call is on a new machine, take that folder along.
#   --mpi ARCHIVE    an MPI library to unpack and use, as build_cuda_mpi.sh packs it;
#                    without it, the one that mpi4py finds
#   --wheels FOLDER  wheels of what Python lacks (optree, deflate, tqdm, pytest-mpi, ...);
#                    all of them are installed, into a temporary folder
#   --output FOLDER  for the results and a log (default: gpu-results)
#   --minutes N      after which no more is begun, and what runs is stopped (default: 8)
#   --run NAME       only one of the runs, which otherwise follow each other:
#       start   see that all starts; its results, in FOLDER/start, mean nothing else
#       tests   what only hardware can show, and the tests that need a GPU, file by file
#       table   what must be shown: speeds, beside other ways
# Other options go to run_all.py, such as --ranks 1 2 4.
# The exit status is 0 if all is done and well, 3 if something is left, else 1.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
declare -A given=([mpi]='' [wheels]='' [output]=gpu-results [minutes]=8
    [run]='start tests table')
declare -A options=([start]=--quick [tests]='--parts facts checks contract'
    [table]='--parts facts tune sizes gradients limit input job gathers torch')
others=()
refuse() { echo "$*" >&2; exit 2; }
say() { printf '\n== %4ds  %s\n' "$SECONDS" "$*"; }
while (($#)); do
    name=${1#--}
    if [[ $1 == --help || $1 == -h ]]; then
        sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit
    elif [[ $1 == --* && -v given[$name] ]]; then
        (($# > 1)) || refuse "$1 needs a value"
        given[$name]=$2; shift 2
    else
        others+=("$1"); shift
    fi
done
archive=${given[mpi]} wheels=${given[wheels]} output=${given[output]}
[[ -z $archive || -f $archive ]] || refuse "there is no file $archive"
[[ -z $wheels || -d $wheels ]] || refuse "there is no folder $wheels"
[[ ${given[minutes]} =~ ^[1-9][0-9]*$ ]] || refuse "--minutes ${given[minutes]} is no number"
for run in ${given[run]}; do
    [[ -v options[$run] ]] || refuse "there is no run $run"
done

use_mpi() { # make mpi4py and this shell find what is in the archive
    mkdir "$work/mpi"
    # Python can unpack what tar cannot, where xz is missing
    tar -C "$work/mpi" -xf "$archive" 2>/dev/null ||
        python3 -m tarfile -e "$archive" "$work/mpi" || return
    local mpirun prefix
    mpirun=$(find "$work/mpi" -path '*/bin/mpirun' -print -quit)
    [[ -n $mpirun ]] || { echo "there is no bin/mpirun in $archive"; return 1; }
    prefix=${mpirun%/bin/mpirun}
    export OPAL_PREFIX=$prefix PRTE_PREFIX=$prefix PMIX_PREFIX=$prefix
    export PATH=$prefix/bin:$PATH MPI4PY_LIBMPI=$prefix/lib/libmpi.so.40
    # What the archive knows better
    # shellcheck disable=SC1091
    [[ ! -f $prefix/env.sh ]] || . "$prefix/env.sh"
}

install_wheels() { # one by one, so that one that does not fit spoils none
    export PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
    for wheel in "$wheels"/*.whl; do
        python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir \
            --upgrade --target "$work/site" "$wheel" || echo "$wheel could not be installed"
    done
    export PYTHONPATH=$work/site${PYTHONPATH:+:$PYTHONPATH}
}

main() {
    # mpirun needs it, and bare machines may not have it up
    ip link set lo up 2>/dev/null || true
    # JAX would take three quarters of the GPU
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PYTHONUNBUFFERED=1
    export XLA_PYTHON_CLIENT_PREALLOCATE=false
    [[ -z $archive ]] || { say "unpack $archive" && use_mpi || return; }
    [[ -z $wheels ]] || { say "install wheels of $wheels"; install_wheels; }
    say 'what there is'
    nvidia-smi 2>&1 | head -15
    PYTHONPATH=$here/../..${PYTHONPATH:+:$PYTHONPATH} python3 -c '
import sys, mpi4py.MPI, cupy, h5py, numpy, pytest, mpidist
print(sys.version, mpi4py.MPI.Get_library_version().splitlines()[0], sep="\n")
for m in (mpidist, cupy, numpy, h5py, mpi4py, pytest):
    print(m.__name__, m.__version__)' || return
    local run left status=3 failed='' folder
    for run in ${given[run]}; do
        # To end a job takes 20 s at most
        left=$((60 * given[minutes] - SECONDS - 25)) status=3 folder=$output
        ((left > 30)) || break
        [[ $run != start ]] || folder=$output/start
        say "run $run, for $left s"
        # shellcheck disable=SC2086
        python3 "$here/run_all.py" --go-on --output "$folder" --minutes \
            "$(printf '%d.%02d' $((left / 60)) $((left % 60 * 100 / 60)))" \
            ${options[$run]} ${others[@]+"${others[@]}"}
        status=$?
        ((status != 3)) || break
        [[ $status == 0 ]] || failed+=" $run"
    done
    ((status != 3)) || { say 'something is left: call this again'; return 3; }
    say "nothing is left;${failed:- no run} failed"
    [[ -z $failed ]]
}

mkdir -p "$output" || exit
work=$(mktemp -d) || exit
trap 'rm -rf "$work"' EXIT
(main) 2>&1 | tee -a "$output/one-machine.log"
exit "${PIPESTATUS[0]}"
