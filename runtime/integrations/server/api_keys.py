"""API keys, and the tenant that each of them belongs to."""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hdtool.data.errors import OptionError
from hdtool.data.inputs import text_in

KEY_VARIABLE = "HDTOOL_API_KEY"
SHARED = ""
"""The tenant of servers without keys, and of keys without a name."""
TENANT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}")


@dataclass(frozen=True)
class ApiKeys:
    """The tenants by their keys; without keys, everybody may ask."""

    tenant_of_key: Mapping[str, str]

    @classmethod
    def read(cls, path: Path | None, environment: Mapping[str, str]) -> ApiKeys:
        """The keys of a file, else the one in the environment.

        A line of the file is a key, or the name of a tenant and its key. Empty lines and lines that begin with # are
        skipped.
        """
        if path is None:
            key = environment.get(KEY_VARIABLE, "").strip()
            return cls({key: SHARED} if key else {})
        keys: dict[str, str] = {}
        for number, line in enumerate(text_in(path, "give the keys as UTF-8 text").splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            *tenant, key = words
            if len(tenant) > 1 or not all(map(TENANT.fullmatch, tenant)) or key in keys:
                raise OptionError(
                    f"{path}, line {number}: a line must be a key that no other line has, or the name of a tenant "
                    "(letters, digits, _ . -) and its key"
                )
            keys[key] = tenant[0] if tenant else SHARED
        if not keys:
            raise OptionError(f"{path} holds no API key: write one on a line, or leave out --api-key-file")
        return cls(keys)

    @property
    def tenants(self) -> list[str]:
        return sorted({*self.tenant_of_key.values()}) or [SHARED]

    def tenant(self, authorization: str | None) -> str | None:
        """The tenant of an ``Authorization`` header; None if its key is missing or wrong."""
        if not self.tenant_of_key:
            return SHARED
        scheme, _, given = (authorization or "").partition(" ")
        found = None
        # All keys are compared, in constant time each, so that the time of the answer shows nothing about them.
        for key, tenant in self.tenant_of_key.items():
            if hmac.compare_digest(key.encode(), given.strip().encode()) and scheme.lower() == "bearer":
                found = tenant
        return found
