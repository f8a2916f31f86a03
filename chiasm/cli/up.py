"""`chiasm up`: the whole system on this machine, until Ctrl-C."""

import argparse
import asyncio
import sys
import time
from functools import partial
from pathlib import Path

import psutil

import chiasm
from chiasm.cli.plan import Plan, PlanError, Wanted, reserved
from chiasm.cli.restart import DEFAULT_BACKOFF, Backoff
from chiasm.cli.samples import DEMO_MODEL_ID, demo_checkpoint, sample_questions
from chiasm.cli.system import Interrupted, Job, Limits, LogSink, PartFailed, supervise

INTERRUPTED = 130


def run(options: argparse.Namespace) -> int:
    """Runs until a signal (0) or a fault (1); 2 for a system that cannot be started as asked."""
    if options.vision != "remote" and options.encoders is not None:
        return refuse("--encoders goes with --vision remote only")
    more = {
        name: getattr(options, name)
        for name in ("host", "port", "llm_port", "encoder_port", "vision", "dtype")
    }
    wanted = wanted_of(options, encoders=options.encoders or 1, **more)
    restart = DEFAULT_BACKOFF if options.restart else None
    code = run_system(wanted, options, partial(_serve, wanted=wanted), restart)
    return 0 if code == INTERRUPTED else code


def wanted_of(options: argparse.Namespace, **more: object) -> Wanted:
    """What the flags shared by `up` and `demo` ask for, with the demo model as the default."""
    model: Path = (options.model or demo_checkpoint()).resolve()
    own_name = DEMO_MODEL_ID if model == demo_checkpoint().resolve() else model.name
    return Wanted(
        model=model,
        model_id=options.model_id or own_name,
        log_level=options.log_level,
        **more,  # type: ignore[arg-type]
    )


def run_system(
    wanted: Wanted, options: argparse.Namespace, job: Job, restart: Backoff | None = None
) -> int:
    """Starts what is wanted, runs `job`, stops all; tells every fault. Returns the exit code."""
    say(f"Chiasm {chiasm.__version__}: {wanted.model_id}, {_parts(wanted)}")
    limits = Limits(ready=options.ready_timeout, stop=options.stop_timeout)
    sink = LogSink(sys.stderr, options.log_dir)
    try:
        with reserved(wanted) as plan:
            return asyncio.run(supervise(plan, job, limits, say, sink, restart))
    except PlanError as error:
        return refuse(str(error))
    except PartFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Interrupted:
        return INTERRUPTED
    finally:
        sink.close()


def say(text: str) -> None:
    """One line of progress."""
    print(text, flush=True)


def since_start() -> float:
    """Seconds since this process was made, its own imports included."""
    return time.time() - psutil.Process().create_time()


def refuse(text: str) -> int:
    """Tells a fault of the command line; returns its exit code."""
    print(f"error: {text}", file=sys.stderr)
    return 2


async def _serve(plan: Plan, *, wanted: Wanted) -> int:
    say(f"\nReady in {since_start():.1f} s. Ctrl-C stops.\n")
    say(_addresses(plan))
    say(_examples(plan, wanted))
    await asyncio.Event().wait()
    return 0


def _parts(wanted: Wanted) -> str:
    count = wanted.encoder_count
    encoders = {0: "no encoder", 1: "1 encoder"}.get(count, f"{count} encoders")
    return f"{encoders}, LLM service, gateway (vision {wanted.vision}, {wanted.dtype})"


def _addresses(plan: Plan) -> str:
    lines = [f"HTTP      {plan.url}/v1", f"LLM       {plan.llm} (gRPC)"]
    lines += [f"encoder   {target} (gRPC)" for target in plan.encoders]
    return "\n".join(lines)


def _examples(plan: Plan, wanted: Wanted) -> str:
    if wanted.vision == "none":
        return _TEXT_EXAMPLE.format(url=plan.url, model=wanted.model_id)
    sample = sample_questions()[0]
    examples = _EXAMPLES.format(
        url=plan.url, model=wanted.model_id, picture=sample.picture, question=sample.question
    )
    return examples + (_compare_example(plan) if plan.encoders else "")


def _compare_example(plan: Plan) -> str:
    return _COMPARE.format(
        program=sys.argv[0], url=plan.url, llm=plan.llm, encoder=plan.encoders[0]
    )


_TEXT_EXAMPLE = """
With curl:

curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{{
  "model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
"""

_EXAMPLES = """
With curl:

curl -s {url}/v1/chat/completions -H 'Content-Type: application/json' -d @- <<END
{{"model": "{model}", "messages": [{{"role": "user", "content": [
  {{"type": "image_url", "image_url":
    {{"url": "data:image/png;base64,$(base64 < '{picture}' | tr -d '\\n')"}}}},
  {{"type": "text", "text": "{question}"}}]}}]}}
END

With Python:

import base64, openai
client = openai.OpenAI(base_url="{url}/v1", api_key="none")
picture = base64.b64encode(open("{picture}", "rb").read()).decode()
answer = client.chat.completions.create(model="{model}", messages=[{{"role": "user", "content": [
    {{"type": "image_url", "image_url": {{"url": f"data:image/png;base64,{{picture}}"}}}},
    {{"type": "text", "text": "{question}"}}]}}])
print(answer.choices[0].message.content)
"""

_COMPARE = """
Do all ways into it give the same text?

{program} compare --url {url} --llm {llm} --encoder {encoder}
"""
