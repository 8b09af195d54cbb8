"""`python -m meshfill prefill|plan|pool|cancel`.

Exit status: 0 done, 1 failed, 2 bad usage or input. Every error is one line on standard error.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from typing import List, Optional

from .client import Client
from .errors import AlreadyExistsError, InvalidArgumentError, MeshfillError, NotFoundError, OutOfRangeError

_TOKEN_VARIABLE = "MESHFILL_TOKEN"
_BAD_INPUT = (InvalidArgumentError, OutOfRangeError, NotFoundError, AlreadyExistsError)


class _UsageError(Exception):
    """Bad usage or input: one line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise _UsageError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m meshfill", description="Client of a Meshfill prefill server")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    commands.required = True
    server = _Parser(add_help=False)
    server.add_argument("--server", required=True, metavar="HOST:PORT", help="where the server listens")
    server.add_argument("--timeout", type=float, metavar="SECONDS", help="give up after so many seconds")
    server.add_argument("--tls", action="store_true", help="encrypt; implied by the certificates")
    server.add_argument("--ca", metavar="FILE", help="root certificates, PEM (default: the system's)")
    server.add_argument("--cert", metavar="FILE", help="client certificate, PEM; with --key")
    server.add_argument("--key", metavar="FILE", help="its private key, PEM")
    server.add_argument("--server-name", metavar="NAME", help="name in the server's certificate (default: the host)")
    server.add_argument("--token-file", metavar="FILE", help=f"file of the bearer token (default: ${_TOKEN_VARIABLE})")
    server.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    shape = _Parser(add_help=False)
    shape.add_argument("--tile", metavar="AxB", help="Q chunks by KV chunks of a rank (default: the planner's choice)")
    shape.add_argument("--heads", type=int, default=0, metavar="H", help="head groups")
    shape.add_argument("--layout", choices=["striped", "zigzag", "contiguous"], help="how tokens are dealt to the ranks")
    shape.add_argument("--stripe", type=int, default=0, metavar="TOKENS", help="tokens in a stripe")

    prefill = commands.add_parser("prefill", parents=[server, shape], help="prefill one prompt and print its first token")
    prompt = prefill.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--ids", metavar="FILE", help="file of decimal token ids; - is standard input")
    prompt.add_argument("--text", metavar="FILE", help="file of text, UTF-8; - is standard input; with --tokenizer")
    prefill.add_argument("--tokenizer", metavar="DIR", help="model folder with tokenizer.json; decodes the first token, too")
    prefill.add_argument("--request-id", default="", metavar="ID")
    prefill.add_argument("--tenant", default="", metavar="NAME")
    prefill.add_argument("--priority", type=int, default=0, metavar="N", help="-2 to 2, others count as the nearest; higher runs first")
    prefill.add_argument("--top-k", type=int, default=1, metavar="K", help="best tokens to report")
    prefill.add_argument("--ignore-cache", action="store_true", help="compute every token")
    prefill.add_argument("--cache-salt", default="", metavar="SALT", help="share cached prefixes with its equals alone")
    prefill.set_defaults(run=_prefill)

    plan = commands.add_parser("plan", parents=[server, shape], help="what a prompt would run; runs nothing")
    plan.add_argument("--tokens", type=int, required=True, metavar="N", help="of the prompt")
    plan.set_defaults(run=_plan)

    pool = commands.add_parser("pool", parents=[server], help="the ranks, the queue and what runs now")
    pool.set_defaults(run=_pool)

    cancel = commands.add_parser("cancel", parents=[server], help="end a prefill")
    cancel.add_argument("id", metavar="ID")
    cancel.set_defaults(run=_cancel)
    return parser


def _read(path: str) -> str:
    """Of a file or of standard input, UTF-8 whatever the locale."""
    try:
        if path == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise _UsageError(f"{path}: {reason}") from None


def _read_ids(path: str) -> List[int]:
    ids = []
    for at, word in enumerate(_read(path).split()):
        if not (word.isascii() and word.isdigit()):
            raise _UsageError(f"{path}: id {at} is {word[:40]!r}, not a decimal number")
        ids.append(int(word))
    return ids


def _client(arguments, tokenizer: Optional[str] = None) -> Client:
    token = (_read(arguments.token_file) if arguments.token_file else os.environ.get(_TOKEN_VARIABLE, "")).strip()
    return Client(
        arguments.server,
        tls=arguments.tls,
        root_certificates=arguments.ca,
        client_certificate=arguments.cert,
        client_key=arguments.key,
        server_name=arguments.server_name,
        token=token or None,
        timeout=arguments.timeout,
        tokenizer=tokenizer,
        tenant=getattr(arguments, "tenant", ""),
    )


def _shape(arguments) -> dict:
    return {"tile": arguments.tile, "heads": arguments.heads, "layout": arguments.layout, "stripe": arguments.stripe}


def _prefill(arguments) -> str:
    if arguments.text and not arguments.tokenizer:
        raise _UsageError("--text needs --tokenizer DIR, the folder of the served model")
    prompt = _read(arguments.text) if arguments.text else _read_ids(arguments.ids)
    with _client(arguments, arguments.tokenizer) as client:
        ids = client.tokenizer.encode(prompt) if arguments.text else prompt
        begin = time.monotonic()
        result = client.prefill(
            ids,
            request_id=arguments.request_id,
            priority=arguments.priority,
            top_k=arguments.top_k,
            ignore_cache=arguments.ignore_cache,
            cache_salt=arguments.cache_salt,
            **_shape(arguments),
        )
        ttft = time.monotonic() - begin
        decoded = client.tokenizer.decode([result.first_token]) if arguments.tokenizer else None
    if arguments.json:
        value = {
            "request_id": result.request_id,
            "tokens": result.tokens,
            "cached_tokens": result.cached_tokens,
            "first_token": result.first_token,
            "top": [{"token": token, "logit": logit} for token, logit in result.top],
            "plan": dataclasses.asdict(result.plan),
            "seconds": dict(dataclasses.asdict(result.seconds), ttft=ttft),
            "comm_bytes": dataclasses.asdict(result.comm_bytes),
            "mfu": result.mfu,
        }
        if result.attempts > 1:
            value["attempts"] = result.attempts
        if result.pack_prompts > 1:
            value["pack_prompts"] = result.pack_prompts
        if decoded is not None:
            value["text"] = decoded
        return json.dumps(value)
    seconds = result.seconds
    lines = [
        f"first token  {result.first_token}" + ("" if decoded is None else f"  {decoded!r}"),
        f"prompt       {result.tokens} tokens" + (f", {result.cached_tokens} cached" if result.cached_tokens else ""),
        f"TTFT         {ttft:.3f} s",
        f"prefill      {seconds.prefill:.3f} s, {result.tokens / max(seconds.prefill, 1e-9):.0f} tokens/s",
        f"queue        {seconds.queue:.3f} s",
        f"attention    {seconds.attention:.3f} s",
        f"comm wait    {seconds.comm_wait:.3f} s",
    ]
    if result.attempts > 1:
        lines.append(f"attempts     {result.attempts}")
    if result.pack_prompts > 1:
        lines.append(f"pack         {result.pack_prompts} prompts, in one pass over the weights")
    if arguments.top_k > 1:
        lines += [f"top          {token:<10} {logit:.4f}" for token, logit in result.top]
    return "\n".join(lines)


def _plan(arguments) -> str:
    with _client(arguments) as client:
        plan = client.plan(arguments.tokens, **_shape(arguments))
    if arguments.json:
        value = dataclasses.asdict(plan)
        for step in value["steps"]:
            if step["spans"] == 1:
                del step["spans"]  # as `meshfill plan --json` has it
        return json.dumps(value)
    chosen = plan.plan
    return "\n".join(
        [
            f"ranks        {chosen.ranks} = {chosen.heads} head groups x {chosen.a} x {chosen.b}, {chosen.layout}",
            f"prefill      {plan.predicted.seconds:.3f} s predicted",
            f"peak bytes   {plan.predicted.peak_bytes}",
        ]
    )


def _pool(arguments) -> str:
    with _client(arguments) as client:
        pool = client.pool()
    if arguments.json:
        return json.dumps(dataclasses.asdict(pool))
    running = pool.running_request_id or "nothing"
    return "\n".join(
        [
            f"state        {pool.state}",
            f"model        {pool.model}, at most {pool.context_tokens} tokens",
            f"ranks        {pool.ranks}, {pool.backend}",
            f"queue        {pool.queued_requests} requests, {pool.queued_tokens} tokens",
            f"running      {running}, layer {pool.running_layers_done} of {pool.running_layers}",
        ]
        + [
            f"request      {request.id}: {f'of {request.tenant}, ' if request.tenant else ''}"
            f"{request.phase}, {request.tokens} tokens, "
            f"about {request.predicted_rest_seconds:.1f} s left"
            for request in pool.requests
        ]
    )


def _cancel(arguments) -> str:
    with _client(arguments) as client:
        client.cancel(arguments.id)
    return json.dumps({"cancelled": arguments.id}) if arguments.json else f"cancelled {arguments.id}"


def main(arguments: Optional[List[str]] = None) -> int:
    """Runs one command; returns its exit status."""
    name = "meshfill"
    try:
        parsed = _parser().parse_args(arguments)
        name = f"meshfill {parsed.command}"
        print(parsed.run(parsed))
        return 0
    except (_UsageError, ValueError, ImportError) as error:
        return _fail(name, error, 2)
    except _BAD_INPUT as error:
        return _fail(name, error, 2)
    except (MeshfillError, OSError) as error:
        return _fail(name, error, 1)
    except KeyboardInterrupt:
        return _fail(name, "interrupted", 1)


def _fail(name: str, error, status: int) -> int:
    print(f"{name}: {' '.join(str(error).split())}", file=sys.stderr)
    return status
