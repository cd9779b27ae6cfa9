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
archive='' wheels='' output=gpu-results minutes=8 runs='start tests table' others=()
while (($#)); do
    case $1 in
        --mpi | --wheels | --output | --minutes | --run)
            (($# > 1)) || { echo "$1 needs a value" >&2; exit 2; }
            case $1 in
                --mpi) archive=$2 ;;
                --wheels) wheels=$2 ;;
                --output) output=$2 ;;
                --minutes) minutes=$2 ;;
                --run) runs=$2 ;;
            esac
            shift 2
            ;;
        -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit ;;
        *) others+=("$1"); shift ;;
    esac
done
[[ -z $archive || -f $archive ]] || { echo "there is no file $archive" >&2; exit 2; }
[[ -z $wheels || -d $wheels ]] || { echo "there is no folder $wheels" >&2; exit 2; }
[[ $minutes =~ ^[1-9][0-9]*$ ]] || { echo "--minutes $minutes is no number" >&2; exit 2; }
for run in $runs; do
    [[ $run =~ ^(start|tests|table)$ ]] || { echo "there is no run $run" >&2; exit 2; }
done

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
    # mpirun needs it, and bare machines may not have it up
    ip link set lo up 2>/dev/null || true
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PYTHONUNBUFFERED=1
    # JAX would take three quarters of the GPU
    export XLA_PYTHON_CLIENT_PREALLOCATE=false
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
    local run left failed=''
    for run in $runs; do
        # To end a job takes 20 s at most
        left=$((60 * minutes - SECONDS - 25))
        ((left > 30)) || { status=3; break; }
        say "run $run, for $left s"
        start_run "$run" "$left"
        status=$?
        ((status != 3)) || break
        [[ $status == 0 ]] || failed+=" $run"
    done
    if [[ $status == 3 ]]; then
        say 'something is left: call this again'
    else
        say "nothing is left;${failed:- no run} failed"
        [[ -z $failed ]] || status=1
    fi
    return $status
}

start_run() { # NAME SECONDS
    local options=(--go-on --output "$output")
    options+=(--minutes "$(printf '%d.%02d' $(($2 / 60)) $(($2 % 60 * 100 / 60)))")
    case $1 in
        start) options+=(--quick --output "$output/start") ;;
        tests) options+=(--parts facts checks contract) ;;
        table) options+=(--parts facts tune sizes gradients limit input job gathers torch) ;;
    esac
    python3 "$here/run_all.py" "${options[@]}" ${others[@]+"${others[@]}"}
}

mkdir -p "$output" || exit
work=$(mktemp -d) || exit
trap 'rm -rf "$work"' EXIT
(main) 2>&1 | tee -a "$output/one-machine.log"
exit "${PIPESTATUS[0]}"
