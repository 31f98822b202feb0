"""One peer of p2p_dmc: the same steps, averaged every tau of them."""

from __future__ import annotations

import task
import torch

import p2p_dmc as dmc


def main() -> None:
    parser = task.options(__doc__)
    parser.add_argument("--name", required=True, help="of the data set")
    parser.add_argument("--tau", type=int, help="local steps per round; AdaComm decides if not given")
    parser.add_argument("--tau0", type=int, default=16, help="AdaComm's first tau")
    parser.add_argument("--t0", type=float, default=60.0, help="seconds between AdaComm's decisions")
    args = parser.parse_args()

    model = task.network(args.hidden, args.seed)
    record = task.Record()
    with dmc.connect() as peer:
        data = peer.dataset(args.name)
        tau = args.tau or dmc.AdaComm("basic", args.tau0, args.t0, min_utilisation=0)
        optimizer = dmc.Optimizer(torch.optim.SGD(model.parameters(), lr=args.lr), peer, tau=tau)
        loader = peer.loader(
            data,
            args.batch_size,
            args.epochs,
            decode=lambda sample: task.tensors(sample["raw"], sample["__key__"]),
            seed=args.seed,
        )
        begun = False
        for epoch in loader.epochs():
            for x, y, numbers in epoch:
                if not begun:
                    begun = True
                    record.begin()
                loss = task.step(model, optimizer, x, y)
                optimizer.step(loss)
                record.step(loss.item(), epoch.index, numbers)
        record.end()
        record.write(model, args, evaluate=peer.is_first)


if __name__ == "__main__":
    main()
