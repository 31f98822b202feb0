"""dmc-peer: the commands a user types. What they do lives elsewhere and is imported when it is needed."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import click

from p2p_dmc import __version__
from p2p_dmc.cli_types import Address, Domain, Fraction, Seconds, Size
from p2p_dmc.config import parse_rate
from p2p_dmc.errors import UserError

EXIT_INTERRUPTED = 130

HOME = click.option(
    "--home",
    type=click.Path(path_type=Path, file_okay=False),
    default=lambda: Path.home() / ".p2p_dmc",
    show_default="~/.p2p_dmc",
    help="Directory of this peer: identity, shards, checkpoints. One agent per home.",
)
JSON = click.option(
    "--json", "as_json", is_flag=True, help="Facts as JSON on standard output, one object a line."
)
LISTEN = click.option(
    "--listen",
    type=Address(),
    metavar="tcp://HOST:PORT",
    help="Where to listen; default loopback and port 7400 or the next free one. Port 0 picks a free one.",
)
ADVERTISE = click.option(
    "--advertise",
    type=Address(),
    metavar="tcp://HOST:PORT",
    help="Address by which other machines reach this one, where that is not the one listened at.",
)
INSECURE = click.option(
    "--insecure", is_flag=True, help="Listen beyond this machine without keys: for a network that you trust."
)
CAPACITY = click.option(
    "--capacity", type=Size(), default="100GiB", show_default=True, help="Disk space offered for shards."
)
MAX_UPLOAD = click.option(
    "--max-upload",
    type=Size(parse=parse_rate),
    metavar="RATE",
    help="At most so much of shards and states is sent, for example 20MB/s or 100Mbit/s; default: what the link takes.",
)
MAX_DOWNLOAD = click.option(
    "--max-download", type=Size(parse=parse_rate), metavar="RATE", help="At most so much of them is fetched."
)
DOMAIN = click.option(
    "--domain",
    type=Domain(),
    metavar="NAME",
    default=None,
    help="What this peer may fail together with, for example rack1: copies of a shard go to different domains. "
    "Default: what this home was last told; '' for none.",
)
SEED = click.argument("seed", required=False, type=Address(several=True))


class Commands(click.Group):
    """Errors are one line on standard error; tracebacks only with --debug."""

    def invoke(self, ctx: click.Context) -> Any:
        debug = ctx.params.get("debug", False)
        if not debug:
            sys.excepthook = _unexpected
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(EXIT_INTERRUPTED)
        except UserError as error:
            if debug:
                raise
            fail(ctx, str(error))
        except OSError as error:
            if debug or error.errno == errno.EPIPE:  # nobody reads on: click ends quietly
                raise
            fail(ctx, f"{error.filename}: {error.strerror}" if error.filename else str(error))


def fail(ctx: click.Context, line: str) -> None:
    """One line, and the exit code for a failure."""
    from p2p_dmc.observe.narrator import printable

    click.echo(f"dmc-peer: {printable(' '.join(line.split()))}", err=True)
    ctx.exit(1)


def _unexpected(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What no code of ours expected; python exits with 1 after it."""
    words = " ".join(str(error).split())
    print(
        f"dmc-peer: internal error: {kind.__name__}: {words}; `dmc-peer --debug` shows where", file=sys.stderr
    )


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="dmc-peer")
@click.option("--debug", is_flag=True, help="Tracebacks and a detailed agent.log.")
@click.pass_context
def main(ctx: click.Context, debug: bool) -> None:
    """Peer-to-peer PyTorch training on machines that you own. One command per machine, no master.

    Exit code 0: done, 1: failed, 2: wrong usage.
    """
    ctx.obj = {"debug": debug}


@main.command("seed-dataset", short_help="Cut a data set into shards, hold and serve them.")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--name", default=None, metavar="NAME", help="Name of the data set; default the name of PATH.")
@click.option(
    "--mode",
    type=click.Choice(["file", "folder", "auto"]),
    default=None,
    show_default="file",
    help="Spread samples freely over shards, or keep the samples of a folder together; auto: keep many small "
    "folders together.",
)
@click.option(
    "--depth",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Depth of the folders that folder mode keeps together; 1 is the top level.",
)
@click.option(
    "--max-shard-size",
    type=Size(auto=True),
    metavar="auto|SIZE",
    default="auto",
    show_default=True,
    help="For example 64MiB; auto: total/256, between 64 KiB and 64 MiB.",
)
@click.option(
    "--replicas",
    type=click.IntRange(1, 16),
    default=None,
    show_default="2",
    help="Peers that hold each shard.",
)
@click.option("--include", multiple=True, metavar="GLOB", help="Only files that match; may be repeated.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="No files that match; may be repeated.")
@click.option(
    "--order",
    type=click.Choice(["shuffle", "keep"]),
    default=None,
    help="Spread samples over shards by a seeded shuffle, or in the order of their keys. Default: tars as they are, "
    "else shuffle.",
)
@click.option(
    "--stem",
    type=click.Choice(["last-dot", "first-dot"]),
    default=None,
    help="Which dot ends the part of a file name that the files of one sample share. Default: the first in tars, "
    "else the last.",
)
@click.option(
    "--val-fraction",
    type=Fraction(),
    default=None,
    metavar="FRACTION",
    help="Hold out so much, by the samples' keys, as a second data set NAME-val that is not trained on.",
)
@click.option(
    "--append",
    is_flag=True,
    help="PATH has grown: make a new version of the data set, of its shards and new ones for what is new.",
)
@click.option(
    "--dry-run", is_flag=True, help="Say what is there and what would be made of it; write nothing."
)
@click.option(
    "--join",
    "seed",
    type=Address(several=True),
    metavar="SEED",
    default=None,
    help="Peers to join: one address or several, comma-separated.",
)
@click.option(
    "--leave-when-replicated", is_flag=True, help="Exit once every shard has its holders elsewhere."
)
@LISTEN
@ADVERTISE
@INSECURE
@CAPACITY
@MAX_UPLOAD
@MAX_DOWNLOAD
@DOMAIN
@click.option(
    "--peer-name", metavar="NAME", default=None, help="Name of this peer, for people; default the host's."
)
@HOME
@JSON
@click.pass_context
def seed_dataset(ctx: click.Context, /, path: Path, **options: Any) -> None:
    """Cut PATH into shards, hold and serve them, and print the line that other machines run.

    PATH is a folder of files or images, WebDataset tars, JSONL, CSV, Parquet, NumPy arrays, tokens, what Hugging
    Face's save_to_disk wrote, or MDS: docs/datasets.md. Of files in folders a sample is those that share a stem, one
    field per extension. Seeding the same data again gives the same shards; what was interrupted is gone on with.
    """
    from p2p_dmc.agent import seed_command

    ctx.exit(seed_command.seed_dataset(path=path, debug=ctx.obj["debug"], **options))


@main.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Train with a script, or only hold and serve shards.",
)
@click.option("--run", default=None, metavar="NAME", help="Name of the run; default the script's stem.")
@click.option(
    "--min-peers",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Begin a new run once so many trainers are ready.",
)
@click.option(
    "--backend",
    type=click.Choice(["auto", "gloo", "nccl"]),
    default=None,
    help="Of torch.distributed; the same for the whole run. Default: the run's, else auto.",
)
@click.option(
    "--quorum",
    type=click.Choice(["majority", "strict", "any"]),
    default=None,
    help="Who goes on after a split. majority: the larger part; strict: the same, and a machine seen to crash "
    "still counts; any: every part. The same for the whole run. Default: the run's, else majority.",
)
@click.option(
    "--name", default=None, metavar="NAME", help="Name of this peer, for people; default the host's."
)
@click.option(
    "--checkpoint-every",
    type=Seconds(),
    default="1m",
    show_default=True,
    help="Write committed state so often: 30s, 5m, 1h.",
)
@click.option(
    "--on-lost",
    type=click.Choice(["wait", "skip"]),
    default=None,
    help="Shards that no live peer holds: wait for them at the epoch's end, or skip their samples. The same for "
    "the whole run. Default: the run's, else wait.",
)
@LISTEN
@ADVERTISE
@INSECURE
@CAPACITY
@MAX_UPLOAD
@MAX_DOWNLOAD
@DOMAIN
@HOME
@JSON
@click.option(
    "--attach", type=click.IntRange(1), default=None, metavar="PID", hidden=True
)  # dmc.join() uses it
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[SEED] [SCRIPT [ARGS...]]")
@click.pass_context
def join(ctx: click.Context, /, words: tuple[str, ...], **options: Any) -> None:
    """Join the peers at SEED; train with SCRIPT, or only hold and serve shards.

    SEED is one address or several, comma-separated. Everything after SCRIPT belongs to the script. Without SEED a
    home is opened again with the peers that it knew. When an agent of this home runs already, it gets the script.
    Ctrl-C leaves gracefully, a second one at once.
    """
    from p2p_dmc.agent import commands

    ctx.exit(commands.join(words=words, debug=ctx.obj["debug"], **options))


@main.command()
@SEED
@HOME
@JSON
def status(seed: str | None, home: Path, as_json: bool) -> None:
    """Members, runs and data sets, as the peer at SEED (default: this home's) sees them."""
    from p2p_dmc.observe import reports

    reports.status(seed, home, as_json)


@main.command()
@SEED
@click.option(
    "--without",
    multiple=True,
    metavar="PEER",
    help="Show what would move if this peer left; may be repeated.",
)
@HOME
@JSON
def placement(seed: str | None, without: tuple[str, ...], home: Path, as_json: bool) -> None:
    """Who should hold which shard, and who does, as the peer at SEED (default: this home's) sees it."""
    from p2p_dmc.observe import reports

    reports.placement(seed, home, without, as_json)


@main.command()
@click.argument("peer", required=False)
@HOME
@JSON
def leave(peer: str | None, home: Path, as_json: bool) -> None:
    """Make a peer leave gracefully: this home's, or PEER, and wait until it has.

    PEER is a name, an address or the start of an id, as `status` shows them.
    """
    from p2p_dmc.observe import reports

    reports.leave(peer, home, as_json)


@main.command()
@SEED
@click.option("--run", default="", metavar="NAME", help="Which run, when several are under way.")
@HOME
@JSON
def stop(seed: str | None, run: str, home: Path, as_json: bool) -> None:
    """Agree to stop a run: all its peers checkpoint the same round; the same join command goes on from there."""
    from p2p_dmc.observe import reports

    reports.stop(seed, home, run, as_json)


@main.command(short_help="Go on without a peer that is gone for good.")
@click.argument("peer")
@click.option("--run", default="", metavar="NAME", help="Which run, when several are under way.")
@click.option("--yes", is_flag=True, help="Do not ask whether that is meant.")
@HOME
@JSON
def evict(peer: str, run: str, yes: bool, home: Path, as_json: bool) -> None:
    """Say that PEER is gone for good: those who wait for it go on with fewer.

    PEER is a name or the start of an id, as `status` shows whom a run waits for; all of them have to be evicted, each
    once, at any peer that waits. What only PEER has trained is lost. If it comes back it joins as a newcomer does.
    """
    from p2p_dmc.observe import reports

    reports.evict(peer, home, run, as_json, yes)


@main.command()
@click.argument("what", type=click.Choice(["list", "verify"]), default="list")
@click.option("--run", default="", metavar="NAME", help="Of this run only.")
@HOME
@JSON
@click.pass_context
def checkpoint(ctx: click.Context, what: str, run: str, home: Path, as_json: bool) -> None:
    """List this home's checkpoints, or verify them: read all, name each that is damaged, and exit with 1 then.

    No agent is needed. A join skips what is damaged, and says so.
    """
    from p2p_dmc.observe import checkpoint_report

    ctx.exit(checkpoint_report.checkpoint(home, run, as_json, verify=what == "verify"))


@main.command()
@click.option("--run", default=None, metavar="NAME", help="Which run, when the home has several.")
@click.option(
    "--from",
    "source",
    default=None,
    metavar="final|checkpoint|VIEW-ROUND",
    help="Default: the final model of a finished run, else the newest whole checkpoint.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["torch", "safetensors"]),
    default=None,
    help="Default: what OUT's ending says, .pt or .safetensors.",
)
@click.option(
    "--with-optimizer",
    is_flag=True,
    help="This peer's state of the script's own optimizer too, in OUT's neighbour .optimizer.",
)
@click.option("--fp32", is_flag=True, help="As peers average it, float32; default: the model's own dtypes.")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@HOME
@JSON
@click.argument("out", type=click.Path(path_type=Path))
def export(**options: Any) -> None:
    """Write a run's parameters to OUT as plain weights that torch and safetensors load.

    Whether this home's agent runs makes no difference.
    """
    from p2p_dmc.agent import export as exporting

    exporting.export(**options)


@main.command()
@click.option(
    "--keep",
    type=click.Path(path_type=Path),
    default=None,
    metavar="DIR",
    help="Leave the peers' homes in DIR.",
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Of data order, model, victim."
)
@click.option("--quick", is_flag=True, help="The same with fewer files and epochs.")
@JSON
@click.pass_context
def demo(ctx: click.Context, keep: Path | None, seed: int, quick: bool, as_json: bool) -> None:
    """Four peers on this machine train on its Python library; one is killed and comes back. Checks what it shows."""
    from p2p_dmc import demo as demonstration

    ctx.exit(demonstration.main(keep=keep, seed=seed, as_json=as_json, quick=quick))


if __name__ == "__main__":
    main()
