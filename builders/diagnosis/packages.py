"""Checks of the packages: what hdtool needs, in versions that it works with, and its extras."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module, metadata

from packaging.requirements import Requirement

from hdtool.builders.diagnosis.finding import MEND, NOTE, Finding
from hdtool.data.errors import reason_of
from hdtool.data.extras import install_command, requirements_of

IMPORTED = ("numba", "transformers", "datasets", "lmdb")
"""Packages that fail when they are imported if another one is too new or too old for them."""
EXTRAS = {
    "gguf": "models in GGUF files",
    "gpus": "a model over several GPUs",
    "quantized": "quantized weights",
    "server": "hdtool serve",
    "structured": "answers that match a schema",
    "vllm": "hdtool serve --engine vllm",
    "ray": "builds on a cluster",
}
STATED = ("torch", "transformers", "numba")
"""Packages whose versions are shown."""


def package_findings() -> Iterator[Finding]:
    needed = [Requirement(line) for line in metadata.requires("hdtool") or ()]
    own = [each for each in needed if each.marker is None]
    yield Finding("hdtool", metadata.version("hdtool"))
    for name in STATED:
        if (version := _version(name)) is not None:
            yield Finding(name, version)
    yield from _unfit(own)
    yield from _broken()
    for extra, purpose in EXTRAS.items():
        yield _extra(extra, purpose, requirements_of(extra))


def _unfit(needed: list[Requirement]) -> Iterator[Finding]:
    faults = [(each, _version(each.name)) for each in needed if not _fits(each)]
    for each, version in faults:
        found = f"{version}, and {each.specifier} is needed" if version else f"missing, and {each} is needed"
        yield Finding(each.name, found, MEND, f'pip install "{each.name}{each.specifier}"')
    if not faults:
        yield Finding("others", f"all {len(needed)} packages that hdtool needs are there, in versions that fit")


def _broken() -> Iterator[Finding]:
    for name in IMPORTED:
        try:
            import_module(name)
        except Exception as error:  # extension modules raise many kinds
            yield Finding(name, f"cannot be imported ({reason_of(error)})", MEND, f"pip install --upgrade {name}")


def _extra(extra: str, purpose: str, parts: list[Requirement]) -> Finding:
    lacking = [each.name for each in parts if _version(each.name) is None]
    command = install_command(extra)
    if lacking:
        return Finding(f"[{extra}]", f"{purpose}: not installed ({', '.join(lacking)})", NOTE, command)
    if wrong := [f"{each.name} {_version(each.name)}" for each in parts if not _fits(each)]:
        return Finding(f"[{extra}]", f"{purpose}: {', '.join(wrong)} does not fit", MEND, command)
    installed = ", ".join(f"{each.name} {_version(each.name)}" for each in parts)
    return Finding(f"[{extra}]", f"{purpose}: {installed}")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _fits(requirement: Requirement) -> bool:
    version = _version(requirement.name)
    return version is not None and requirement.specifier.contains(version, prereleases=True)
