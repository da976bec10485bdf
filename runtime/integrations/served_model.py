"""Opens the stores of a model that another engine's server loads; the model is given as in that server's options."""

from __future__ import annotations

from collections.abc import Sequence

from hdtool.data.stores.tenant import Tenant
from hdtool.runtime.settings.decoding import StoresConfig
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.stores.store_opener import StoreOpener
from hdtool.runtime.target.load import load_tokenizer
from hdtool.runtime.weights.checkpoint_identity import served_checkpoint


def opener_for_served(
    model: str,
    tokenizer: str | None,
    names: Sequence[str],
    stores: StoresConfig,
    tenant: str | None,
    *,
    revision: str | None,
    tokenizer_revision: str | None = None,
    trust_remote_code: bool = False,
) -> StoreOpener:
    """Return the opener of the model's stores for ``tenant`` or, if None, for the tenant of the server's ``names``.

    If ``tokenizer`` is None, the model's own is read. Raise an ``HdtoolError`` if it cannot be loaded.
    """
    loaded_from, read_from = (
        ModelConfig(place, trust_remote_code=trust_remote_code) for place in (model, tokenizer or model)
    )
    read = load_tokenizer(read_from, tokenizer_revision or revision)
    checkpoint = served_checkpoint(loaded_from, revision)
    return StoreOpener(model, read, checkpoint, stores, Tenant.served(names, model, tenant))
