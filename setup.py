"""Builds the Cython extensions; everything else is in pyproject.toml."""

from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

ROOT = Path(__file__).parent
FLAGS = ["-O3", "-D_GNU_SOURCE", "-fno-strict-aliasing", "-Wno-unused-function"]
SOURCES = sorted(p.relative_to(ROOT) for p in (ROOT / "ext").rglob("*.pyx"))
DEPENDS = sorted(p.relative_to(ROOT) for kind in ("*.px[di]", "*.h") for p in (ROOT / "ext").rglob(kind))
INCLUDES = sorted({str(p.parent) for p in DEPENDS})


def extension(source: Path) -> Extension:
    """One compiled module: `ext/bmoe/host/_memory.pyx` becomes `bmoe.host._memory`."""
    return Extension(
        ".".join(source.relative_to("ext").with_suffix("").parts),
        [str(source)],
        include_dirs=INCLUDES,
        depends=[str(p) for p in DEPENDS],
        extra_compile_args=FLAGS,
        extra_link_args=["-pthread", "-ldl"],
    )


def drop_stale() -> None:
    """Removes generated C that is older than a declaration: cythonize does not see that a module's own .pxd changed."""
    newest = max((ROOT / p).stat().st_mtime for p in DEPENDS)
    for c in (ROOT / "ext").rglob("*.c"):
        if c.stat().st_mtime < newest:
            c.unlink()


drop_stale()

setup(
    ext_modules=cythonize(
        [extension(source) for source in SOURCES],
        include_path=["ext"],
        language_level=3,
        compiler_directives={
            "boundscheck": False,
            "wraparound": False,
            "cdivision": True,
            "initializedcheck": False,
            "embedsignature": True,
        },
    )
)
