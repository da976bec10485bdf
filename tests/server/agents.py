"""Requests as coding agents send them: recorded between them and the server, with other words and fewer tools.

Claude Code 2.1.197, Codex 0.171.0, OpenCode 1.18.33, Cline 3.0.65, Continue 1.5.47, Aider 0.86.2.
"""

from __future__ import annotations

from typing import Any

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
INSTRUCTIONS = "You work on the code of this folder. Read files before you change them."
QUESTION, NEXT = "What is a list comprehension?", "And what is a generator?"
Row = dict[str, Any]


def schema(*required: str, **properties: Any) -> Row:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


TEXT, WHOLE = {"type": "string"}, {"type": "integer", "minimum": 0, "maximum": 9007199254740991}
DRAFT = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
CACHED: Row = {"cache_control": {"type": "ephemeral"}}


def text(content: str, kind: str = "text", **more: Any) -> Row:
    return {"type": kind, "text": content, **more}


CLAUDE_CODE: Row = {
    "model": "demo",
    "messages": [
        {"role": "user", "content": [text("Today is Monday."), text(QUESTION, **CACHED)]},
        {"role": "system", "content": "Agents that can be started: explorer."},
    ],
    "system": [
        text("x-anthropic-billing-header: cc_version=2.1.197.ab8; cc_entrypoint=sdk-cli;"),
        text("You are an agent.", **CACHED),
        text(INSTRUCTIONS, **CACHED),
    ],
    "tools": [
        {
            "name": "Read",
            "description": "Read a file.",
            "input_schema": DRAFT | schema("file_path", file_path=TEXT, offset=WHOLE, pages=TEXT),
        },
        {
            "name": "TaskUpdate",
            "description": "Change a task.",
            "input_schema": DRAFT
            | schema(
                "taskId",
                taskId=TEXT,
                status={"anyOf": [{"type": "string", "enum": ["pending", "completed"]}, {"const": "deleted"}]},
                metadata={"type": "object", "propertyNames": TEXT, "additionalProperties": {}},
            ),
        },
    ],
    "metadata": {"user_id": '{"device_id":"0"}'},
    "max_tokens": 400,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}


def codex_item(role: str, *texts: str) -> Row:
    parts = [text(content, "input_text") for content in texts]
    return {"type": "message", "id": "msg_01a2", "role": role, "content": parts}


def codex_function(name: str, parameters: Row) -> Row:
    return {"type": "function", "name": name, "description": "Do it.", "strict": False, "parameters": parameters}


CODEX: Row = {
    "model": "demo",
    "stream": True,
    "input": [
        codex_item("developer", INSTRUCTIONS),
        codex_item("developer", "There are no skills.", "Files are read only."),
        codex_item("user", "The folder is /src."),
        codex_item("user", QUESTION),
    ],
    "tools": [
        codex_function("exec_command", schema("cmd", cmd=TEXT, login={"type": "boolean"}, yield_time_ms=WHOLE)),
        {
            "type": "namespace",
            "name": "multi_agent_v1",
            "description": "Agents below this one.",
            "tools": [codex_function("close_agent", schema("target", target=TEXT))],
        },
        codex_function("get_goal", schema()),
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a2",
    "client_metadata": {"session_id": "01a2", "x-codex-turn-metadata": '{"request_kind":"turn"}'},
}


def chat(*functions: tuple[str, Row], **more: Any) -> Row:
    described = [
        {"type": "function", "function": {"name": name, "description": "Do it.", "parameters": parameters}}
        for name, parameters in functions
    ]
    messages = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": QUESTION}]
    streamed = {"model": "demo", "messages": messages, "stream": True}
    return streamed | ({"tools": described, "stream_options": {"include_usage": True}} if functions else {}) | more


OPENCODE = chat(
    ("bash", DRAFT | schema("command", command=TEXT, timeout={"exclusiveMinimum": 0, "type": "integer"})),
    ("read", DRAFT | schema("filePath", filePath=TEXT, offset=WHOLE, limit=WHOLE)),
    tool_choice="auto",
    max_tokens=400,
)
CLINE = chat(
    ("search_codebase", schema("queries", queries={"type": "array", "items": TEXT})),
    ("read_files", schema("files", files={"type": "array", "items": schema("path", path=TEXT, line=WHOLE)})),
    tool_choice="auto",
)
CONTINUE = chat(("Read", schema("filepath", filepath=TEXT)), ("List", schema("dirpath", dirpath=TEXT)), max_tokens=400)
AIDER = chat(temperature=0) | {
    "messages": [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": "Rename the function."},
        {"role": "assistant", "content": "Ok, it is renamed."},
        {"role": "user", "content": QUESTION},
    ]
}
