"""``hdtool chat``: open a session and answer messages until the user leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from hdtool.cli import options_from_settings as options
from hdtool.cli.command import quiet_libraries
from hdtool.cli.options_from_settings import without
from hdtool.data.errors import HdtoolError, PromptError
from hdtool.data.notes import tell
from hdtool.runtime.settings.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig

if TYPE_CHECKING:
    from hdtool.cli.chat_session import ChatSession, ReadMessage


def chat(
    *,
    loading: Annotated[ModelConfig, without().as_argument()],
    system: options.System = None,
    decoding: Annotated[DecodeConfig, without("batch_size", max_new_tokens=1024)],
    stores: Annotated[StoresConfig, without("namespace")],
    sampling: SamplingConfig,
    stats: options.ShowStats = False,
    show_drafts: options.ShowDrafts = False,
) -> None:
    """Hold a conversation with a language model.

    Answers stream to standard output and their speed, not their text, depends on drafting. The KV cache of earlier
    turns is kept. Ctrl-C ends an answer, Ctrl-D the conversation; /help lists the commands.
    """
    from hdtool.cli.answer_output import passes_summary, print_stores
    from hdtool.cli.chat_session import ChatSession, message_reader
    from hdtool.data.chat import has_chat_template
    from hdtool.runtime.answering.answer_prompts import Answerer

    quiet_libraries()
    answerer = Answerer(loading, decoding, sampling, stores=stores)
    if not has_chat_template(answerer.loaded.tokenizer):
        raise PromptError(
            f"{loading.name} has no chat template, so it cannot hold a conversation: name an instruction-tuned model, "
            "or use hdtool generate"
        )
    print_stores(answerer.store_set)
    if stats:
        tell(passes_summary(answerer.loaded.target))
    session = ChatSession(answerer, system, stats=stats, color=show_drafts)
    tell(f"{loading.name}: /help lists the commands, Ctrl-D leaves")
    _converse(session, message_reader())


def _converse(session: ChatSession, read: ReadMessage) -> None:
    """Read and answer messages until the session or the input ends or, in a script, Ctrl-C interrupts an answer."""
    from hdtool.cli.chat_session import is_interactive

    while not session.is_over:
        try:
            message = read()
        except EOFError:
            return
        try:
            session.take(message)
        except HdtoolError as error:
            tell(f"error: {error}")
        except KeyboardInterrupt:
            session.is_interrupted = True
        if session.is_interrupted and not is_interactive():
            raise KeyboardInterrupt  # in a script, Ctrl-C ends the whole run
