"""``hdtool doctor``: whether hdtool works on this machine, and what to do where it does not."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

from hdtool.cli.parameters import options
from hdtool.cli.parameters.settings import only
from hdtool.runtime.config import ModelConfig


def doctor(
    *,
    loading: Annotated[
        ModelConfig,
        only("model", "gguf_file", "revision", "trust_remote_code")
        .described(model="Check this model too: whether it would load, and what it would draft from. It is not loaded.")
        .as_argument(),
    ],
    as_json: options.JsonObject = False,
) -> int:
    """Check the installation, the stores and a model.

    Decodes ten tokens with the embedded model, with and without drafts. Prints what was found, and for what is missing
    or wrong the command that mends it. The exit code is 1 if something does not work.
    """
    from hdtool.builders.diagnosis.decoding import decoding_findings
    from hdtool.builders.diagnosis.finding import MEND
    from hdtool.builders.diagnosis.folders import folder_findings, store_findings
    from hdtool.builders.diagnosis.machine import machine_findings
    from hdtool.builders.diagnosis.model import model_findings
    from hdtool.builders.diagnosis.packages import package_findings
    from hdtool.cli.output.findings_table import in_words
    from hdtool.cli.output.show_answers import quiet_libraries

    quiet_libraries()
    groups = {
        "machine": list(machine_findings()),
        "packages": list(package_findings()),
        "decoding": list(decoding_findings()),
        "folders": list(folder_findings()),
        "stores": list(store_findings()),
    }
    if loading.model is not None:
        groups[f"model {loading.name}"] = list(model_findings(loading))
    wrong = sum(finding.state == MEND for findings in groups.values() for finding in findings)
    if as_json:
        rows = {group: [asdict(finding) for finding in findings] for group, findings in groups.items()}
        print(json.dumps({"ok": not wrong, "checks": rows}, ensure_ascii=False))
    else:
        print(in_words(groups))
    return 1 if wrong else 0
