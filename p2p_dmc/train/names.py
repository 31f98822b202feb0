"""Parameter names, the same on every peer and the same as in the model's ``state_dict``."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch


def name_parameters(
    groups: Sequence[dict[str, Any]], model: torch.nn.Module | None
) -> list[tuple[str, torch.Tensor]]:
    """The parameters of an optimizer's groups, in order, with names.

    From ``model`` if given, else from the groups (torch keeps names given to it by ``named_parameters``),
    else from the smallest living module that has them all (one look through the garbage collector), else
    ``param.<number>``.
    """
    parameters = [parameter for group in groups for parameter in group["params"]]
    if model is None and all(len(group.get("param_names", ())) == len(group["params"]) for group in groups):
        names = [name for group in groups for name in group["param_names"]]
        if len(set(names)) == len(names):
            return list(zip(names, parameters, strict=True))
    known = _names_in(model) if model is not None else _discover(parameters)
    named = [(known.get(id(p), f"param.{index}"), p) for index, p in enumerate(parameters)]
    if len({name for name, _ in named}) < len(named):
        return [(f"param.{index}", p) for index, p in enumerate(parameters)]
    return named


def _names_in(module: torch.nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in module.named_parameters()}


def _discover(parameters: Sequence[torch.Tensor]) -> dict[int, str]:
    wanted = {id(parameter) for parameter in parameters}
    candidates: list[tuple[int, int, dict[int, str]]] = []
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.nn.Module) and "_modules" in vars(thing):
            names = _names_in(thing)
            if wanted <= names.keys():
                # wrappers (compile, data parallel) hold the same parameters under longer names
                letters = sum(len(names[key]) for key in wanted)
                candidates.append((letters, len(list(thing.modules())), names))
    return min(candidates, key=lambda found: found[:2])[2] if candidates else {}
