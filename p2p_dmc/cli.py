"""dmc-peer: the commands a user types. What they do lives elsewhere and is imported when it is needed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from p2p_dmc import __version__
from p2p_dmc.errors import UserError

HOME = click.option(
    "--home",
    type=click.Path(path_type=Path, file_okay=False),
    default=lambda: Path.home() / ".p2p_dmc",
    show_default="~/.p2p_dmc",
    help="Directory of this peer: identity, shards, checkpoints.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Facts as JSON, one object a line.")
LISTEN = click.option("--listen", metavar="tcp://HOST:PORT", help="Where to listen; default loopback, port 7400 or the next free.")
ADVERTISE = click.option("--advertise", metavar="tcp://HOST:PORT", help="Address that other machines use for this one.")
INSECURE = click.option("--insecure", is_flag=True, help="Listen beyond this machine, without keys (a trusted network).")
CAPACITY = click.option("--capacity", default="100GiB", show_default=True, help="Disk space offered for shards.")
NAME = click.option("--peer-name", default=None, help="Name of this peer, for people; default the host's.")


class Commands(click.Group):
    """Errors are one line on standard error; tracebacks only with --debug."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            if ctx.params.get("debug"):
                raise
            click.echo(f"dmc-peer: {error}", err=True)
            ctx.exit(1)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="dmc-peer")
@click.option("--debug", is_flag=True, help="Tracebacks and a detailed agent.log.")
@click.pass_context
def main(ctx: click.Context, debug: bool) -> None:
    """Peer-to-peer PyTorch training on machines that you own. One command per machine, no master."""
    ctx.obj = {"debug": debug}


@main.command("seed-dataset")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--name", default=None, help="Name of the data set; default the name of PATH.")
@click.option("--mode", type=click.Choice(["file", "folder"]), default="file", show_default=True, help="Spread samples freely, or keep folders together.")
@click.option("--depth", type=click.IntRange(1, 64), default=1, show_default=True, help="Depth of the folders that folder mode keeps together.")
@click.option("--max-shard-size", default="auto", show_default=True, help="For example 64MiB; auto: total/256, 64 KiB to 64 MiB.")
@click.option("--replicas", type=click.IntRange(1, 16), default=2, show_default=True, help="Peers that hold each shard.")
@click.option("--include", multiple=True, metavar="GLOB", help="Only files that match; may be repeated.")
@click.option("--order", type=click.Choice(["shuffle", "keep"]), default="shuffle", show_default=True, help="How samples are spread over shards.")
@click.option("--stem", type=click.Choice(["last-dot", "first-dot"]), default="last-dot", show_default=True, help="Which dot ends a sample's name.")
@click.option("--join", "seed", metavar="SEED", default=None, help="Peers to join, comma-separated.")
@click.option("--leave-when-replicated", is_flag=True, help="Exit once every shard has its holders elsewhere.")
@LISTEN
@ADVERTISE
@INSECURE
@CAPACITY
@NAME
@HOME
@JSON
@click.pass_context
def seed_dataset(ctx: click.Context, path: Path, **options: Any) -> None:
    """Cut PATH into shards, hold and serve them, and print the line that other machines run."""
    from p2p_dmc.agent import commands

    ctx.exit(commands.seed_dataset(path=path, debug=ctx.obj["debug"], **options))


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--run", default=None, help="Name of the run; default the script's stem.")
@click.option("--min-peers", type=click.IntRange(1), default=1, show_default=True, help="Found the run once so many trainers are ready.")
@click.option("--backend", type=click.Choice(["auto", "gloo", "nccl"]), default="auto", show_default=True)
@click.option("--quorum", type=click.Choice(["majority", "strict", "any"]), default="majority", show_default=True)
@click.option("--name", default=None, help="Name of this peer, for people; default the host's.")
@click.option("--checkpoint-every", default="1m", show_default=True, help="Write committed state so often: 30s, 5m.")
@click.option("--on-lost", type=click.Choice(["wait", "skip"]), default="wait", show_default=True, help="Shards that no live peer holds.")
@LISTEN
@ADVERTISE
@INSECURE
@CAPACITY
@HOME
@JSON
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[SEED] [SCRIPT [ARGS...]]")
@click.pass_context
def join(ctx: click.Context, words: tuple[str, ...], **options: Any) -> None:
    """Join the peers at SEED; train with SCRIPT, or only hold and serve shards.

    SEED is one address or several, comma-separated. Everything after SCRIPT belongs to the script. Without SEED a
    home is opened again with the peers that it knew.
    """
    from p2p_dmc.agent import commands

    ctx.exit(commands.join(words=words, debug=ctx.obj["debug"], **options))


@main.command()
@click.argument("seed", required=False)
@HOME
@JSON
def status(seed: str | None, home: Path, as_json: bool) -> None:
    """Members, runs and data sets, as the peer at SEED (default: this home's) sees them."""
    from p2p_dmc.observe import reports

    reports.status(seed, home, as_json)


@main.command()
@click.argument("seed", required=False)
@click.option("--without", multiple=True, metavar="PEER", help="What would move if this peer left; may be repeated.")
@HOME
@JSON
def placement(seed: str | None, without: tuple[str, ...], home: Path, as_json: bool) -> None:
    """Who should hold which shard, and who does."""
    from p2p_dmc.observe import reports

    reports.placement(seed, home, without, as_json)


@main.command()
@click.argument("peer", required=False)
@HOME
@JSON
def leave(peer: str | None, home: Path, as_json: bool) -> None:
    """Make a peer leave gracefully: this home's, or PEER (a name or the start of an id)."""
    from p2p_dmc.observe import reports

    reports.leave(peer, home, as_json)


@main.command()
@click.argument("seed", required=False)
@click.option("--run", default="", help="Which run, when several are under way.")
@HOME
@JSON
def stop(seed: str | None, run: str, home: Path, as_json: bool) -> None:
    """Agree to stop a run: all its peers checkpoint the same round; the same join command goes on from there."""
    from p2p_dmc.observe import reports

    reports.stop(seed, home, run, as_json)


@main.command()
@click.option("--keep", type=click.Path(path_type=Path), default=None, metavar="DIR", help="Leave the peers' homes in DIR.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of data order and model.")
@JSON
def demo(keep: Path | None, seed: int, as_json: bool) -> None:
    """Four peers on this machine train on its Python library; one is killed and comes back. Checks what it shows."""
    from p2p_dmc import demo as demonstration

    sys.exit(demonstration.main(keep=keep, seed=seed, as_json=as_json))


if __name__ == "__main__":
    main()
