#!/usr/bin/env bash
# Build a CUDA-aware Open MPI, for those whose site has none:
#
#   bash benchmarks/gpu/build_cuda_mpi.sh --prefix ~/ompi-cuda openmpi-5.0.7.tar.bz2
#
# The source is a release's tar file (www.open-mpi.org); without one, Debian's or
# Ubuntu's source package is fetched (needs a deb-src line in apt's sources). It needs a
# C compiler, make, perl, and the headers of CUDA; neither a GPU nor a driver. It takes
# some minutes.
#   --prefix FOLDER  where to install it (default: ~/ompi-cuda)
#   --cuda FOLDER    where CUDA is (default: $CUDA_HOME, or /usr/local/cuda)
#   --ucx FOLDER     UCX to build with, where there is one with CUDA (for InfiniBand)
#   --jobs N         how many compilers at once (default: all processors)
#   --pack FILE      pack it into a tar file, too, to be carried to other machines
# Other options go to configure: after --, such as -- --with-slurm.
# What is built can be moved. To use it: . FOLDER/env.sh
set -euo pipefail

prefix=$HOME/ompi-cuda cuda=${CUDA_HOME:-/usr/local/cuda} ucx='' jobs=$(nproc)
pack='' source='' options=()
while (($#)); do
    case $1 in
        --prefix) prefix=$2; shift 2 ;;
        --cuda) cuda=$2; shift 2 ;;
        --ucx) ucx=$2; shift 2 ;;
        --jobs) jobs=$2; shift 2 ;;
        --pack) pack=$2; shift 2 ;;
        --) shift; options=("$@"); break ;;
        -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit ;;
        -*) echo "there is no option $1" >&2; exit 2 ;;
        *) source=$(realpath "$1"); shift ;;
    esac
done
prefix=$(realpath -m "$prefix")
[[ -f $cuda/include/cuda.h ]] || { echo "there is no $cuda/include/cuda.h" >&2; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Get and unpack the source
cd "$work"
if [[ -z $source ]]; then
    apt-get source --download-only openmpi
    source=$(ls "$work"/openmpi_*.orig.tar.*z*)
fi
mkdir tree && tar -C tree --strip-components=1 -xf "$source"

# The driver's library is looked for when a program runs; to link, a stub will do
stubs=''
for folder in "$cuda"/lib64/stubs "$cuda"/targets/*/lib/stubs; do
    [[ ! -e $folder/libcuda.so ]] || stubs=$folder
done
if [[ -z $stubs ]]; then
    stubs=$work/stubs
    mkdir "$stubs"
    # All names of the header that look like functions
    grep -ohE '\bcu[A-Z][A-Za-z0-9_]*' "$cuda/include/cuda.h" | sort -u |
        sed 's/.*/int &(void) { return 999; }/' >"$work/stub.c"
    gcc -shared -fPIC -w -Wl,-soname,libcuda.so.1 -o "$stubs/libcuda.so.1" "$work/stub.c"
    ln -s libcuda.so.1 "$stubs/libcuda.so"
fi

# Only what needs the driver is a plugin, so that the rest starts where there is none
plugins=accelerator-cuda,btl-smcuda,rcache-gpusm,rcache-rgpusm
with_ucx=(--without-ucx)
if [[ -n $ucx ]]; then
    plugins=$plugins,pml-ucx,osc-ucx,common-ucx
    with_ucx=(--with-ucx="$ucx")
fi
mkdir build && cd build
../tree/configure --prefix="$prefix" \
    --with-cuda="$cuda" --with-cuda-libdir="$stubs" --enable-mca-dso="$plugins" \
    "${with_ucx[@]}" \
    --with-hwloc=internal --with-libevent=internal \
    --with-pmix=internal --with-prrte=internal \
    --enable-mpi-fortran=no --disable-oshmem --disable-sphinx --disable-static \
    --enable-prte-prefix-by-default ${options[@]+"${options[@]}"}
make -j"$jobs"
make install

# How to use it, wherever it lies
cat >"$prefix/env.sh" <<'ENV'
_p=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export OPAL_PREFIX=$_p PRTE_PREFIX=$_p PMIX_PREFIX=$_p PATH=$_p/bin:$PATH
export LD_LIBRARY_PATH=$_p/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
# mpi4py's wheels (>= 4.1) load this library
export MPI4PY_LIBMPI=$_p/lib/libmpi.so.40
unset _p
ENV
if [[ -n $pack ]]; then
    tar -C "$(dirname "$prefix")" -caf "$pack" "$(basename "$prefix")"
fi
echo
echo ". $prefix/env.sh    # then mpirun, and mpi4py, are these"
"$prefix/bin/ompi_info" --parsable --all | grep mpi_built_with_cuda_support:value
