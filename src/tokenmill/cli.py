"""The command `tokenmill`: finds the subcommand, and turns errors into one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

from tokenmill import __version__
from tokenmill.errors import TokenmillError

USER_ERROR = 2
INTERRUPTED = 130


def serve(arguments: Sequence[str]) -> int:
    """Serve a model over HTTP, with OpenAI's API."""
    from tokenmill.flags import ServeFlags, parse
    from tokenmill.server import launch

    flags = parse(ServeFlags, "serve", arguments)
    return launch.serve(flags.run, flags.server)


def pull(arguments: Sequence[str]) -> int:
    """Fetch a model into the cache."""
    from tokenmill.flags import PullFlags, parse
    from tokenmill.hub import resolve_model

    model = parse(PullFlags, "pull", arguments).model
    print(f"{model}: {resolve_model(model)}")
    return 0


def models(arguments: Sequence[str]) -> int:
    """List the models, formats and tokenizers that are supported."""
    from tokenmill import overview
    from tokenmill.flags import ModelsFlags, parse

    parse(ModelsFlags, "models", arguments)
    print("\n".join(overview.models()))
    return 0


def plan(arguments: Sequence[str]) -> int:
    """Tell what serving a model would take of memory and time."""
    from tokenmill import overview
    from tokenmill.flags import PlanFlags, parse

    print("\n".join(overview.plan(parse(PlanFlags, "plan", arguments))))
    return 0


def chat(arguments: Sequence[str]) -> int:
    """Talk with a model in the terminal."""
    from tokenmill.flags import ChatFlags, parse

    flags = parse(ChatFlags, "chat", arguments)
    from tokenmill import terminal
    from tokenmill.llm import LLM

    with LLM(flags.run) as llm:
        return terminal.chat(llm, flags.system, flags.sampling.over(llm.default_params()))


def generate(arguments: Sequence[str]) -> int:
    """Continue a text and print what comes."""
    from tokenmill.flags import GenerateFlags, parse

    flags = parse(GenerateFlags, "generate", arguments)
    from tokenmill import terminal
    from tokenmill.llm import LLM

    with LLM(flags.run) as llm:
        return terminal.generate(llm, flags.prompt, flags.sampling.over(llm.default_params()))


def run_batch(arguments: Sequence[str]) -> int:
    """Answer a file of requests in OpenAI's batch format."""
    from tokenmill.flags import BatchFlags, parse

    flags = parse(BatchFlags, "run-batch", arguments)
    from tokenmill.server import batch

    options = {name: value for name, value in vars(flags).items() if name != "run"}
    return batch.run_batch(flags.run, batch.BatchOptions(**options))


def bench(arguments: Sequence[str]) -> int:
    """Measure this machine: bench offline, kernels, online, steps, sched, http."""
    from tokenmill.bench.options import BENCHES
    from tokenmill.flags import parse

    kind = arguments[0] if arguments else ""
    if kind in BENCHES:
        options = parse(BENCHES[kind], f"bench {kind}", arguments[1:])
        import_module(f"tokenmill.bench.{kind}").run(options)
        return 0
    is_help = kind in ("-h", "--help")
    print(f"usage: tokenmill bench {{{','.join(BENCHES)}}} [...]", file=sys.stdout if is_help else sys.stderr)
    return 0 if is_help else USER_ERROR


def simulate(arguments: Sequence[str]) -> int:
    """Replay a trace through the scheduler in virtual time."""
    from tokenmill.bench.options import SimulateOptions
    from tokenmill.flags import parse

    options = parse(SimulateOptions, "simulate", arguments)
    import_module("tokenmill.bench.simulate").run(options)
    return 0


COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "serve": serve,
    "chat": chat,
    "generate": generate,
    "pull": pull,
    "models": models,
    "plan": plan,
    "run-batch": run_batch,
    "bench": bench,
    "simulate": simulate,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        try:
            return _run(given)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes stdout once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(given: Sequence[str]) -> int:
    name = given[0] if given else "--help"
    if name in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if name in ("-V", "--version"):
        print(f"tokenmill {__version__}")
        return 0
    if name not in COMMANDS:
        print(f"tokenmill: no command {name!r}; there are: {', '.join(COMMANDS)}", file=sys.stderr)
        return USER_ERROR
    try:
        return COMMANDS[name](given[1:])
    except TokenmillError as error:
        print(f"tokenmill: {error.message}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        # One that left an exec() of text, as dataclasses use, makes Python end by SIGINT; the next exec() clears that.
        exec("")
        return INTERRUPTED


def _overview() -> str:
    lines = [f"  {name:10} {(command.__doc__ or '').strip()}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: tokenmill COMMAND [...]", "", *lines, "", "tokenmill COMMAND --help tells a command's flags."]
    )
