"""`chiasm plan`: how many encoders and LLM services a load needs, and how long pictures wait.

`chiasm.cli.plan` is something else: which processes `chiasm up` starts.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from chiasm.cli.mixes import Size
from chiasm.errors import ChiasmError
from chiasm.sizing.answers import StepLine
from chiasm.sizing.fleet import (
    AnswerChoice,
    EncoderChoice,
    Impossible,
    Limits,
    Rates,
    Shape,
    Sized,
    Targets,
    Traffic,
    size,
)

_MEASURED_ENCODER = ("encode_seconds", "encode_seconds_a_row", "encode_variation")
_MEASURED_LLM = ("step_seconds", "step_seconds_a_token")


class Refused(Exception):
    """What was asked cannot be planned; the text names the flag."""


@dataclass(frozen=True)
class _Known:
    """What is known before planning, from flags, a checkpoint and measurements."""

    rates: Rates
    shape: Shape
    rows: tuple[tuple[int, float], ...]


def run(options: argparse.Namespace) -> int:
    """0 with a plan, 1 if no number of replicas meets the targets, 2 for what cannot be planned."""
    try:
        known = _known(options)
        sized = size(
            _traffic(options, known.rows),
            known.rates,
            known.shape,
            _limits(options),
            _targets(options),
        )
    except Refused as error:
        return _told(error, 2)
    except Impossible as error:
        return _told(error, 1)
    except ChiasmError as error:
        return _told(f"a service that was measured answered: {error}", 2)
    except KeyboardInterrupt:
        return 130
    if options.json:
        print(json.dumps(as_json(sized, known.rates), indent=2))
    else:
        print("\n".join(_lines(sized, known.rates, options)))
    return 0


def as_json(sized: Sized, rates: Rates) -> dict[str, Any]:
    """The plan with the rates that it rests on; times in seconds, sizes in bytes."""
    return {"rates": asdict(rates), **asdict(sized)}


# ---- what is known


def _known(options: argparse.Namespace) -> _Known:
    _check_flags(options)
    shape, rows = _from_model(options)
    if options.measure:
        shape, rows = _measure(options, shape, rows)
    if options.width:
        shape = replace(shape, row_bytes=options.width * _element_bytes(options))
    if options.kv_bytes_a_token:
        shape = replace(shape, kv_token_bytes=options.kv_bytes_a_token)
    return _Known(_rates(options), shape, rows)


def _check_flags(options: argparse.Namespace) -> None:
    pictures = any(options.pictures[1:])
    if options.rows and options.sizes:
        raise Refused("--rows and --sizes both say how large pictures are; give one of them")
    if options.sizes and not options.model and not options.measure:
        raise Refused(
            "--sizes needs --model (its rule makes rows of pixels), or --measure; or --rows"
        )
    if pictures and not (options.rows or options.sizes):
        raise Refused("--rows or --sizes must say how large pictures are; or --pictures 0")
    if options.measure and not (options.llm or options.encoder):
        raise Refused("--measure needs --encoder HOST:PORT, --llm HOST:PORT or both")
    if not options.measure and (options.llm or options.encoder):
        raise Refused("--encoder and --llm name what --measure measures; add --measure")
    if pictures and not (options.measure and options.encoder) and options.encode_seconds is None:
        raise Refused("--encode-seconds must say what a picture takes; or --measure --encoder")
    if not (options.measure and options.llm) and options.step_seconds is None:
        raise Refused("--step-seconds must say what a step takes; or --measure --llm")
    if options.step_token_budget < options.max_running:
        raise Refused("--step-token-budget must be at least --max-running")
    if 0 < options.decode_stretch <= 1:
        raise Refused("--decode-stretch must be above 1, or 0 for no limit")
    if options.kv_bytes and not (options.model or options.kv_bytes_a_token):
        raise Refused("--kv-bytes needs --model or --kv-bytes-a-token")


def _from_model(options: argparse.Namespace) -> tuple[Shape, tuple[tuple[int, float], ...]]:
    rows = options.rows or ()
    if options.model is None:
        return Shape(), rows
    # Loads transformers.
    from chiasm.cli.model_shape import read_model
    from chiasm.models.checkpoint import CheckpointError

    try:
        model = read_model(options.model, options.dtype)
    except CheckpointError as error:
        raise Refused(f"--model: {error.message}") from error
    return model.shape, model.rows(options.sizes) if options.sizes else rows


def _measure(
    options: argparse.Namespace, shape: Shape, rows: tuple[tuple[int, float], ...]
) -> tuple[Shape, tuple[tuple[int, float], ...]]:
    # Loads the gRPC client.
    from chiasm.cli import measured
    from chiasm.client import Client

    equal = tuple((one, 1 / len(measured.SIZES)) for one in measured.SIZES)
    sizes: Sequence[tuple[Size, float]] = options.sizes or equal
    try:
        with Client(
            options.llm, options.encoder, timeout=options.timeout, tls=_mutual_tls(options)
        ) as client:
            if options.encoder:
                found = measured.measure_encoder(client, sizes, _progress)
                _keep(options, _MEASURED_ENCODER, (*_line(found.line), found.variation))
                shape = replace(shape, row_bytes=found.row_bytes)
                if options.sizes:
                    shares = [share for _, share in options.sizes]
                    rows = tuple(zip(found.rows, shares, strict=True))
            if options.llm:
                step = measured.measure_llm(client, options.step_token_budget, _progress)
                _keep(options, _MEASURED_LLM, _line(step))
    except measured.Unmeasurable as error:
        raise Refused(f"--measure: {error}") from error
    except ValueError as error:
        raise Refused(str(error)) from error
    return shape, rows


def _mutual_tls(options: argparse.Namespace) -> Any:
    from chiasm.client import MutualTls
    from chiasm.rpc import mtls

    files = mtls.files(options.mtls_cert, options.mtls_key, options.mtls_ca)
    for flag, names, needed in (
        ("--mtls-llm", options.mtls_llm, bool(options.llm)),
        ("--mtls-encoder", options.mtls_encoder, bool(options.encoder)),
    ):
        mtls.check(files, flag, names, needed=needed)
    if files is None:
        return None
    return MutualTls(files.cert, files.key, files.ca, options.mtls_llm, options.mtls_encoder)


def _line(line: StepLine) -> tuple[float, float]:
    return line.fixed, line.each


def _keep(options: argparse.Namespace, names: Sequence[str], values: Sequence[float]) -> None:
    """Sets the flags that were not given; shows those to be given the next time."""
    for name, value in zip(names, values, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    flags = (
        f"--{name.replace('_', '-')} {value:.4g}" for name, value in zip(names, values, strict=True)
    )
    _progress("measured: " + " ".join(flags))


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _rates(options: argparse.Namespace) -> Rates:
    encode = StepLine(options.encode_seconds or 0.0, options.encode_seconds_a_row or 0.0)
    if not any(options.pictures[1:]):
        encode = StepLine(0.0, 0.0)
    elif encode.fixed + encode.each <= 0:
        raise Refused("--encode-seconds is 0: give it or --encode-seconds-a-row a time above 0")
    step = StepLine(options.step_seconds, options.step_seconds_a_token or 0.0)
    if step.fixed + step.each <= 0:
        raise Refused("--step-seconds is 0: give it or --step-seconds-a-token a time above 0")
    return Rates(encode, step, options.encode_variation or 0.0)


def _element_bytes(options: argparse.Namespace) -> int:
    return 4 if options.dtype == "float32" else 2


def _traffic(options: argparse.Namespace, rows: tuple[tuple[int, float], ...]) -> Traffic:
    return Traffic(
        options.requests,
        options.pictures,
        rows,
        options.text_tokens,
        options.answer_tokens,
        options.cache_hits,
        options.encoder_cache_hits,
        options.prefix_hits,
    )


def _limits(options: argparse.Namespace) -> Limits:
    return Limits(
        options.max_running,
        options.step_token_budget,
        options.decode_stretch,
        options.kv_bytes or 0,
    )


def _targets(options: argparse.Namespace) -> Targets:
    return Targets(
        options.utilisation, options.encode_wait, options.token_seconds, options.first_token_seconds
    )


# ---- what is shown


def _lines(sized: Sized, rates: Rates, options: argparse.Namespace) -> Iterator[str]:
    traffic = sized.traffic
    yield (
        f"{traffic.requests:g} requests/s: {traffic.pictures_a_request:.3g} pictures each, "
        f"prompts of {traffic.prompt_tokens:.0f} tokens, answers of {traffic.answer_tokens:.0f}"
    )
    yield ""
    yield from _encoder_lines(sized, options)
    yield ""
    yield from _llm_lines(sized, rates, options)
    yield ""
    yield from _network_lines(sized)
    for note in sized.notes:
        yield f"Note: {note}."


def _encoder_lines(sized: Sized, options: argparse.Namespace) -> Iterator[str]:
    if sized.encoders is None:
        yield "Encoders: none, no picture is encoded."
        return
    yield (
        f"Encoders: {sized.encoders.needed}, for {sized.traffic.encoded:.3g} pictures/s of "
        f"{_time(sized.encoders.seconds)}, at most {options.utilisation:.0%} busy, p95 of the wait "
        f"{_time(options.encode_wait)} or less"
    )
    rows = [_encoder_row(one, sized.encoders.needed) for one in sized.encoders.choices]
    yield from _table(("", "encoders", "busy", "mean wait", "p95 wait", ""), rows)


def _encoder_row(choice: EncoderChoice, needed: int) -> tuple[str, ...]:
    return (
        "->" if choice.replicas == needed else "",
        str(choice.replicas),
        f"{choice.busy:.0%}",
        _time(choice.wait_mean),
        _time(choice.wait_p95),
        choice.fault,
    )


def _llm_lines(sized: Sized, rates: Rates, options: argparse.Namespace) -> Iterator[str]:
    yield (
        f"LLM services: {sized.llm_services.needed}, steps of {_time(rates.step.fixed)} and "
        f"{_time(rates.step.each)} a token, at most {options.utilisation:.0%} busy"
    )
    rows = [_llm_row(one, sized.llm_services.needed) for one in sized.llm_services.choices]
    heads = ("", "services", "busy", "running", "a token", "first token", "KV memory each", "")
    yield from _table(heads, rows)


def _llm_row(choice: AnswerChoice, needed: int) -> tuple[str, ...]:
    arrow, pace = "->" if choice.replicas == needed else "", choice.pace
    if pace is None:
        return (arrow, str(choice.replicas), "-", "-", "-", "-", "-", choice.fault)
    return (
        arrow,
        str(choice.replicas),
        f"{pace.utilisation:.0%}",
        f"{pace.running:.1f}, p99 {pace.running_p99:.0f}",
        _time(pace.token_seconds),
        _time(pace.first_token_seconds),
        "-" if choice.kv_bytes is None else _bytes(choice.kv_bytes),
        choice.fault,
    )


def _network_lines(sized: Sized) -> Iterator[str]:
    if sized.bytes_per_second is None or sized.picture_bytes is None:
        if sized.encoders is not None:
            yield "Network: give --model or --width to know it."
        return
    yield (
        f"Network, encoders to LLM services: {_bytes(sized.picture_bytes)} a picture, "
        f"{_bytes(sized.bytes_per_second)}/s ({sized.bytes_per_second * 8 / 1e9:.3g} Gbit/s)"
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[at]) for row in (heads, *rows)) for at in range(len(heads))]
    for row in (heads, *rows):
        yield "  ".join(
            cell.rjust(width) if at < len(heads) - 1 else cell
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _bytes(count: float) -> str:
    for unit, size_of in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size_of:
            return f"{count / size_of:.3g} {unit}"
    return f"{count:.0f} bytes"


def _told(error: object, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code
