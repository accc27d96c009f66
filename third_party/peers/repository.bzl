"""Sources of programs that benchmarks compare with.

@peers holds what hosts run per step, @tpu_peers kernels for TPUs. Only the files
that do that work; benchmarks/peers imports them with the rest of their packages
stubbed.
"""

load("//third_party/python:host.bzl", "host_python")
load("//third_party/python:packages.bzl", "SITE_BUILD", "pip")

_HOST_ARCHIVES = """\
sglang-jax==0.0.2 --hash=sha256:1ba0d3f7801a47c3961e50995a6ee832d8d094c5595d9ad865f4f9ebbe3fdfcb
vllm-tpu==0.32.0 --hash=sha256:5d43961d4c214f2ff1bc3f6d2bce616fb2483411372b47637588d86cfb03708c
"""

_TPU_ARCHIVES = """\
tpu-inference==0.32.0 --hash=sha256:7c25a3c76cefd383f06ef115a6ed4d7bed82c081f047046bfef55f5913ea06d4
"""

# No __init__.py of theirs that imports more than these.
_HOST_FILES = [
    "sgl_jax/srt/mem_cache/allocator.py",
    "vllm/utils/hashing.py",
    "vllm/utils/math_utils.py",
    "vllm/v1/core/block_pool.py",
    "vllm/v1/core/kv_cache_coordinator.py",
    "vllm/v1/core/kv_cache_manager.py",
    "vllm/v1/core/kv_cache_metrics.py",
    "vllm/v1/core/kv_cache_utils.py",
    "vllm/v1/core/single_type_kv_cache_manager.py",
    "vllm/v1/hisparse/block_pool.py",
    "vllm/v1/kv_cache_interface.py",
    "vllm/v1/kv_cache_layout.py",
    "vllm/v1/kv_cache_spec_registry.py",
    "vllm/v1/request.py",
]

_TPU_FILES = [
    "tpu_inference/kernels/ragged_paged_attention/v3/kernel.py",
    "tpu_inference/kernels/ragged_paged_attention/v3/util.py",
]

_EXTRACT = """
import glob, os, sys, tarfile, zipfile
target, files = sys.argv[1], sys.argv[2:]

def save(name, data):
    if name in files:
        path = os.path.join(target, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)
        files.remove(name)

for path in glob.glob("archives/*.whl"):
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            save(name, archive.read(name))
for path in glob.glob("archives/*.tar.gz"):
    with tarfile.open(path) as archive:
        for member in archive:
            if member.isfile():
                save(member.name.partition("/")[2], archive.extractfile(member).read())
if files:
    sys.exit("missing: " + ", ".join(files))
"""

def _peers_impl(rctx):
    python = host_python(rctx)
    rctx.file("lock.txt", rctx.attr.archives)
    rctx.file("backend/setuptools/__init__.py")
    rctx.symlink(Label("//third_party/peers:no_build.py"), "backend/setuptools/build_meta.py")
    pip(rctx, python, [
        "download",
        "--require-hashes",
        "--no-deps",
        "--no-build-isolation",
        "--no-binary=vllm-tpu",
        "--only-binary=sglang-jax,tpu-inference",
        # Theirs asks for one; the files taken run on all of ours.
        "--ignore-requires-python",
        "--dest=archives",
        "--requirement=lock.txt",
    ], "Fetching the peers' sources", environment = {
        "PYTHONPATH": str(rctx.path("backend")),
    })
    result = rctx.execute([python["executable"], "-I", "-c", _EXTRACT, "site"] + rctx.attr.files)
    if result.return_code != 0:
        fail("\ncould not unpack the peers' sources: " + result.stderr)
    rctx.delete("archives")
    rctx.delete("backend")
    rctx.file("place.txt", str(rctx.path("site")) + "\n")
    rctx.file("BUILD.bazel", SITE_BUILD)

_peers_repository = repository_rule(
    implementation = _peers_impl,
    attrs = {
        "archives": attr.string(mandatory = True),
        "files": attr.string_list(mandatory = True),
    },
)

def peers_repositories():
    """@peers and @tpu_peers."""
    _peers_repository(name = "peers", archives = _HOST_ARCHIVES, files = _HOST_FILES)
    _peers_repository(name = "tpu_peers", archives = _TPU_ARCHIVES, files = _TPU_FILES)
