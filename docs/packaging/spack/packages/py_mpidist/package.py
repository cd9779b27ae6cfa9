"""mpidist for Spack, from a clone of its repository.

    spack repo add docs/packaging/spack
    spack dev-build py-mpidist@main        # in the clone

It needs a package py-deflate (PyPI's deflate, a binding of libdeflate), which Spack did
not have in 2026: `spack create --template python` makes one.

It has no `url` and no `git` until the project has a public address: add one here.
"""

from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PyMpidist(PythonPackage):
    """The tf.distribute programming model for MPI clusters, without TensorFlow."""

    license("Apache-2.0")

    version("main")

    variant("cuda", default=False, description="Replicas on NVIDIA GPUs, by CuPy")
    variant("torch", default=False, description="mpidist.torch")
    variant("jax", default=False, description="mpidist.jax")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("mpi", type="run")
    depends_on("py-mpi4py@4.1:", type=("build", "run"))
    depends_on("py-numpy@1.26:", type=("build", "run"))
    depends_on("py-h5py@3.10:", type=("build", "run"))
    depends_on("py-deflate@0.9:", type=("build", "run"))
    depends_on("py-optree@0.14:", type=("build", "run"))
    depends_on("py-ml-dtypes@0.4:", type=("build", "run"))
    depends_on("py-cupy@14.0:", type="run", when="+cuda")
    depends_on("py-torch@2.2:", type="run", when="+torch")
    depends_on("py-jax@0.6:", type="run", when="+jax")
