"""Parameter names, the same on every peer and the same as in the model's ``state_dict``."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch

STATISTICS = ("running_mean", "running_var")
"""What layers like BatchNorm call the buffers in which they keep what they have seen."""


def name_parameters(
    groups: Sequence[dict[str, Any]], model: torch.nn.Module | None, found: torch.nn.Module | None = None
) -> list[tuple[str, torch.Tensor]]:
    """The parameters of an optimizer's groups, in order, with names.

    From ``model`` if given, else from the groups (torch keeps names given to it by ``named_parameters``),
    else from ``found`` (``find_model``'s, if that was asked already), else ``param.<number>``.
    """
    parameters = [parameter for group in groups for parameter in group["params"]]
    if model is None and all(len(group.get("param_names", ())) == len(group["params"]) for group in groups):
        names = [name for group in groups for name in group["param_names"]]
        if len(set(names)) == len(names):
            return list(zip(names, parameters, strict=True))
    model = model if model is not None else found if found is not None else find_model(groups)
    known = _names_in(model) if model is not None else {}
    named = [(known.get(id(p), f"param.{index}"), p) for index, p in enumerate(parameters)]
    if len({name for name, _ in named}) < len(named):
        return [(f"param.{index}", p) for index, p in enumerate(parameters)]
    return named


def name_statistics(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The running statistics of the model's normalisations, floating, in its order, named as in ``state_dict``."""
    return [
        (name, buffer)
        for name, buffer in model.named_buffers()
        if name.rpartition(".")[2] in STATISTICS and buffer.is_floating_point()
    ]


def find_model(groups: Sequence[dict[str, Any]]) -> torch.nn.Module | None:
    """The smallest living module that has all parameters of the groups (one look through the garbage collector)."""
    wanted = {id(parameter) for group in groups for parameter in group["params"]}
    candidates: list[tuple[int, int, torch.nn.Module]] = []
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.nn.Module) and "_modules" in vars(thing):
            names = _names_in(thing)
            if wanted <= names.keys():
                # wrappers (compile, data parallel) hold the same parameters under longer names
                letters = sum(len(names[key]) for key in wanted)
                candidates.append((letters, len(list(thing.modules())), thing))
    return min(candidates, key=lambda candidate: candidate[:2])[2] if candidates else None


def _names_in(module: torch.nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in module.named_parameters()}
