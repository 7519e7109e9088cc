"""Builds the Cython extensions; everything else is in pyproject.toml."""

from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

ROOT = Path(__file__).parent
FLAGS = ["-O3", "-D_GNU_SOURCE", "-fno-strict-aliasing", "-Wno-unused-function"]


def extension(name: str) -> Extension:
    """One compiled module `bmoe._<name>` from `ext/<name>.pyx` and the headers beside it."""
    depends = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "ext").rglob("*.px[di]"))
    depends += sorted(str(p.relative_to(ROOT)) for p in (ROOT / "ext").glob("*.h"))
    return Extension(
        f"bmoe._{name}",
        [f"ext/{name}.pyx"],
        include_dirs=["ext"],
        depends=depends,
        extra_compile_args=FLAGS,
        extra_link_args=["-pthread", "-ldl"],
    )


def drop_stale() -> None:
    """Removes generated C that is older than a declaration: cythonize does not see that a module's own .pxd changed."""
    newest = max(p.stat().st_mtime for p in (ROOT / "ext").rglob("*.px[di]"))
    for c in (ROOT / "ext").glob("*.c"):
        if c.stat().st_mtime < newest:
            c.unlink()


drop_stale()
MODULES = [p.stem for p in sorted((ROOT / "ext").glob("*.pyx"))]

setup(
    ext_modules=cythonize(
        [extension(name) for name in MODULES],
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
