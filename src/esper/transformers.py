"""Growth inside a Hugging Face Trainer.

grow = esper.transformers.GrowCallback(slots=["bert.encoder.layer.0"])
Trainer(model, args, train_dataset=train, eval_dataset=val, callbacks=[grow]).train()
grow.export().save_pretrained("grown")
"""

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import signature
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from esper.api import Body, attach, list_slots, save_network
from esper.api.distributed import Processes
from esper.api.slots import Slots, as_slots
from esper.growth.blueprints.catalogue import BlueprintCatalogue, default_catalogue
from esper.growth.devices import devices_of, keeping_generators
from esper.growth.hooks import SEEDS_SAVED, clear_flag, set_flag
from esper.growth.sites import SlotChoice, evaluating
from esper.leyline import ConfigError, EsperWarning, ForgottenCallError, PackageMissingError
from esper.leyline.depth import AUTO, Depth
from esper.tolaria.engine.batches import has_length

try:
    import accelerate  # noqa: F401  (a Trainer cannot be made without it)
    from transformers import EvalPrediction, TrainerCallback
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.trainer_pt_utils import (
        find_batch_size,
        nested_concat,
        nested_numpify,
        nested_truncate,
    )
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
    from transformers.utils.generic import find_labels
except ModuleNotFoundError as error:
    raise PackageMissingError(f"esper.transformers needs {error.name}", "transformers") from None

GROWTH = "esper.pt"  # in the folder of a checkpoint, next to optimizer.pt


class GrowCallback(TrainerCallback):
    """Grows a model while a Trainer trains it; every evaluation is a step.

    `slots`, `depth` and `options` (`controller`, `budget`, `key`, ...) are those of `esper.attach`.
    `monitor` is a metric of the evaluation; lower is better for a loss, higher for others, unless
    `mode` is given. To measure what a seed contributes, the evaluation is repeated without it; for
    any metric but `eval_loss` this needs the Trainer's `compute_metrics`, or `evaluate(model)`,
    which returns the metric. `example` is one batch (default: of the training data), `steps` the
    number of evaluations (default: from the training arguments). `seed_lr` and `seed_weight_decay`
    are for seeds; their gradients are clipped by `max_grad_norm`, too.

    After training the model is at its best epoch. Several processes (torchrun) grow in step.
    Checkpoints include the growth, and the Trainer resumes with it; `resume_from` is the
    checkpoint, if it is not in `output_dir`. Raises ConfigError for arguments that cannot work.
    """

    def __init__(
        self,
        slots: SlotChoice | Slots = AUTO,
        monitor: str = "eval_loss",
        *,
        depth: Depth | str | None = None,
        mode: Literal["max", "min"] | None = None,
        compute_metrics: Callable[[EvalPrediction], Mapping[str, float]] | None = None,
        evaluate: Callable[[nn.Module], float] | None = None,
        example: Any = None,
        steps: int | None = None,
        seed_lr: float | None = None,
        seed_weight_decay: float | None = None,
        resume_from: str | Path | None = None,
        **options: Any,
    ) -> None:
        if mode not in (None, "max", "min"):
            raise ConfigError(f"mode must be 'max' or 'min', got {mode!r}")
        if not isinstance(monitor, str):
            raise ConfigError(f"monitor must be the name of a metric, got {type(monitor).__name__}")
        if monitor != "eval_loss" and compute_metrics is None and evaluate is None:
            raise ConfigError(
                f"{monitor} cannot be measured without a seed; give the Trainer's compute_metrics= "
                "or evaluate=, a function of the model"
            )
        self.slots, self.monitor = as_slots(slots, depth), monitor
        mode = mode or ("min" if monitor.endswith("loss") else "max")
        self.sign = -1.0 if mode == "min" else 1.0
        self.compute_metrics, self.evaluate = compute_metrics, evaluate
        self.example, self.steps, self.options = example, steps, options
        self.seed_settings = {"seed_lr": seed_lr, "seed_weight_decay": seed_weight_decay}
        self.resume_from = resume_from
        self.body: Body | None = None
        self._given: list[list[nn.Parameter]] = []  # of each group of the Trainer's optimizer
        self._training = self._repeated = self._counted = self._own_scores = False
        self._missing: str | None = None
        self._loader: Any = None

    def export(self) -> nn.Module:
        """The grown model as a plain model, with `save_pretrained` and its other methods."""
        return self._trained().export()

    def save(self, folder: str | Path) -> Path:
        """Save the live network for `esper.load(folder, model, blueprints_inside())`."""
        return save_network(self._trained().model, Path(folder))

    def _trained(self) -> Body:
        if self.body is None:
            raise ForgottenCallError("no Trainer has trained with this GrowCallback")
        return self.body

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, **parts: Any
    ) -> None:
        _check_arguments(args)
        example = _example(parts["train_dataloader"]) if self.example is None else self.example
        spec = self.slots
        if isinstance(spec.modules, Depth):
            _check_unused(args, model)
        else:
            spec = replace(
                spec,
                layout=_layouts(model, example) if spec.layout is None else spec.layout,
                causal=_is_causal(model) if spec.causal is None else spec.causal,
                blueprints=spec.blueprints or blueprints_inside(),
            )
        self.body = attach(
            model,
            slots=spec,
            example=example,
            evaluate=lambda: self._measure(args, model),
            steps=self.steps or _evaluations(args, state),
            **self.options,
        )
        optimizer = getattr(parts["optimizer"], "optimizer", parts["optimizer"])
        self._given = [list(group["params"]) for group in optimizer.param_groups]
        self.body.manage(optimizer, parts["lr_scheduler"], **self.seed_settings)
        set_flag(model, SEEDS_SAVED)
        self._training, self._repeated = True, self.evaluate is not None
        if state.global_step > 0:
            self._resume(args, state)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """The Trainer clips the gradients of the model's own parameters, grown blocks included."""
        seeds = self._seed_parameters()
        if args.max_grad_norm and seeds and not isinstance(self.slots.modules, Depth):
            nn.utils.clip_grad_norm_(seeds, args.max_grad_norm)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """The Trainer resets the gradients of the model's own parameters only."""
        for parameter in self._seed_parameters():
            parameter.grad = None

    def on_evaluate(
        self, args: Any, state: Any, control: Any, *, metrics: Mapping[str, float], **parts: Any
    ) -> None:
        if not self._training or self.body is None:
            return
        if self.monitor not in metrics:
            # There may be several data sets, each with its own names.
            self._missing = ", ".join(metrics)
            return
        self._missing, self._loader = None, parts["eval_dataloader"]
        if self.body.optimizer_steps == 0:
            return  # before the first step
        score = self.sign * metrics[self.monitor]
        if not self._repeated:
            self._choose_measure(args, score)
        self.body.step(self._own_score(args) if self._own_scores else score)

    def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self._check_monitored()

    def on_save(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Save the growth next to the Trainer's files, and remove seeds from those, because the
        Trainer loads them before the seeds exist."""
        if self.body is None or not args.should_save:
            return
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        saved = self.body.state_dict() if self.body.begun else None
        measure = (self._counted, self._own_scores) if self._repeated else None
        growth = {"step": state.global_step, "body": saved, "measure": measure}
        if saved is None and isinstance(self.slots.modules, Depth):
            # The Trainer loads its files into a model with other blocks.
            growth["model"] = self.body.model.host.state_dict()
            growth["optimizer"] = self.body.host.optimizer.state_dict()
        _replace(folder / GROWTH, growth)
        cuts = (("optimizer.pt", self._cut_optimizer), ("scheduler.pt", self._cut_scheduler))
        for name, cut in cuts:
            if (folder / name).is_file():
                _replace(folder / name, cut(torch.load(folder / name, weights_only=True)))

    def on_train_end(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, **parts: Any
    ) -> None:
        self._check_monitored()
        self._training = False
        if self.body is not None and self.body.begun:
            self.body.finish()
        clear_flag(model, SEEDS_SAVED)

    def _resume(self, args: Any, state: Any) -> None:
        assert self.body is not None
        usual = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        path = Path(self.resume_from or usual) / GROWTH
        if not path.is_file():
            raise ConfigError(
                f"training resumes from step {state.global_step}, but the growth is missing: there "
                f"is no {path}; give the checkpoint's folder as resume_from="
            )
        saved = torch.load(path, weights_only=True)
        if saved["step"] != state.global_step:
            raise ConfigError(
                f"{path} is of step {saved['step']}, but training resumes from step "
                f"{state.global_step}; give the folder of that checkpoint as resume_from="
            )
        if "model" in saved:
            self.body.host.optimizer.load_state_dict(saved["optimizer"])
            self.body.load_weights(saved["model"])
        if saved["body"] is not None:
            self.body.load_state_dict(saved["body"])
            if (measure := saved.get("measure")) is not None:
                self._repeated, (self._counted, self._own_scores) = True, measure
            if state.global_step >= state.max_steps and self.evaluate is None:
                raise ConfigError(
                    "the training to resume was complete, so the Trainer evaluates no more and the "
                    "best model cannot be chosen; give evaluate=, a function of the model, or "
                    "train for more epochs"
                )

    def _seed_parameters(self) -> list[nn.Parameter]:
        if self.body is None:
            return []
        network = self.body.model
        return [p for index, _ in network.each_slot() for p in network.seed_parameters(index)]

    def _cut_optimizer(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state for the groups that the Trainer makes; blocks that come later have none."""
        assert self.body is not None
        live = (p for group in self.body.host.optimizer.param_groups for p in group["params"])
        numbers = {id(param): number for number, param in enumerate(live)}
        found, groups, size = {}, [], 0
        for group, params in zip(state["param_groups"], self._given, strict=False):
            groups.append({**group, "params": list(range(size, size + len(params)))})
            for param in params:
                own = state["state"].get(numbers.get(id(param)))
                if own is not None:
                    found[size] = own
                size += 1
        return {"state": found, "param_groups": groups}

    def _cut_scheduler(self, state: dict[str, Any]) -> dict[str, Any]:
        assert self.body is not None
        groups, own = len(self.body.host.optimizer.param_groups), len(self._given)
        per_group = {k for k, v in state.items() if isinstance(v, list) and len(v) == groups}
        return {k: v[:own] if k in per_group else v for k, v in state.items()}

    def _check_monitored(self) -> None:
        if self._missing is not None:
            raise ConfigError(
                f"the evaluation has no metric {self.monitor!r}; it has {self._missing}"
            )

    def _measure(self, args: Any, model: nn.Module) -> float:
        if self.evaluate is not None:
            return self.sign * float(self.evaluate(model))
        found = repeat_evaluation(
            model,
            self._loader,
            args.label_names,
            self.compute_metrics,
            self._trained().processes,
            counted=self._counted,
        )
        if self.monitor not in found:
            raise ConfigError(
                f"compute_metrics returns no {self.monitor!r}; it returns {list(found)}"
            )
        return self.sign * found[self.monitor]

    def _own_score(self, args: Any) -> float:
        assert self.body is not None
        with evaluating(self.body.model), keeping_generators(devices_of(self.body.model)):
            return self._measure(args, self.body.model.host)

    def _choose_measure(self, args: Any, score: float) -> None:
        """Scores with and without a seed must be measured in the same way: like the Trainer does,
        with or without a count of labels, or else both by repetition."""
        assert self.body is not None
        self._repeated, found = True, []
        options = (False, True) if _takes_count(self.body.model.host) else (False,)
        for self._counted in options:
            found.append(self._own_score(args))
            if abs(found[-1] - score) <= 1e-4 * max(1.0, abs(score)):
                return
        self._counted, self._own_scores = False, True
        warnings.warn(
            f"the Trainer measured {self.monitor} {self.sign * score:.6g}, and Esper's repetition "
            f"{self.sign * found[0]:.6g}, which is used for growth; if that is wrong, give "
            "evaluate=, a function of the model",
            EsperWarning,
            stacklevel=2,
        )


def blueprints_inside() -> BlueprintCatalogue:
    """All blueprints but branches, which add to the output: these models compute their loss
    inside."""
    return BlueprintCatalogue(
        tuple(spec for spec in default_catalogue().specs if spec.kind != "branch")
    )


class _Evaluated(NamedTuple):
    """A batch of an evaluation: the loss of each row, and outputs and labels as arrays."""

    losses: Any = None
    outputs: Any = None
    labels: Any = None


@torch.no_grad()
def repeat_evaluation(
    model: nn.Module,
    loader: Any,
    label_names: list[str] | None,
    compute_metrics: Callable[[EvalPrediction], Mapping[str, float]] | None,
    processes: Processes,
    *,
    counted: bool = False,
) -> dict[str, float]:
    """The metrics of a Trainer on the evaluation data of all processes, without calls to callbacks.
    With `counted` losses are divided by the number of labels, as some Trainers do."""
    config = getattr(model, "config", None)
    ignored = {"loss", *getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])}
    names = label_names or find_labels(type(model))
    mine = []
    for batch in loader:
        count, scale = dict[str, Any](), 1
        if counted:
            # As the Trainer does: divided by the mean number over the processes.
            scale = processes.size
            labels_here = batch["labels"].ne(-100).sum()
            count["num_items_in_batch"] = sum(processes.gather(int(labels_here)))
        found = model(**batch, **count)
        losses = outputs = labels = None
        if found.get("loss") is not None:
            losses = np.full(find_batch_size(batch), scale * float(found["loss"]))
        if compute_metrics is not None:
            outputs = nested_numpify(tuple(v for k, v in found.items() if k not in ignored))
            labels = nested_numpify(tuple(batch[name] for name in names if name in batch))
        mine.append(_Evaluated(losses, outputs, labels))
    data: Any = getattr(loader, "dataset", None)
    rows = len(data) if has_length(data) else None
    return _metrics(_all_rows(processes.gather(mine), rows), compute_metrics)


def _all_rows(found: list[list[_Evaluated]], rows: int | None) -> _Evaluated:
    """The batches of all processes in the Trainer's order, without the rows that it repeats at the
    end to fill the last batches."""
    batches = [batch for same in zip_longest(*found) for batch in same if batch]
    parts = []
    for column in zip(*batches, strict=True):
        whole = column[0]
        for part in column[1:]:
            whole = None if part is None else nested_concat(whole, part, -100)
        parts.append(whole if whole is None or rows is None else nested_truncate(whole, rows))
    return _Evaluated(*parts)


def _metrics(
    found: _Evaluated, compute_metrics: Callable[[EvalPrediction], Mapping[str, float]] | None
) -> dict[str, float]:
    metrics = {} if found.losses is None else {"eval_loss": float(found.losses.mean())}
    if compute_metrics is not None:
        outputs, labels = (
            each[0] if len(each) == 1 else each for each in (found.outputs, found.labels)
        )
        given = compute_metrics(EvalPrediction(predictions=outputs, label_ids=labels))
        metrics |= {k if k.startswith("eval_") else f"eval_{k}": float(v) for k, v in given.items()}
    return metrics


def _takes_count(model: nn.Module) -> bool:
    return any(p.kind == p.VAR_KEYWORD for p in signature(model.forward).parameters.values())


def _check_arguments(args: Any) -> None:
    if args.n_gpu > 1:
        raise ConfigError(
            f"the Trainer copies the model to {args.n_gpu} devices in every pass (DataParallel), "
            "where the seeds would be missing; start one process for each device with torchrun"
        )
    for name in ("fsdp", "deepspeed"):
        if getattr(args, name, None):
            raise ConfigError(
                f"with {name} a process has only a part of each parameter or of its optimizer's "
                "state, but growth saves and restores whole networks; leave it out"
            )
    if args.eval_strategy == "no":
        raise ConfigError("GrowCallback needs evaluations; set eval_strategy='epoch'")
    if args.load_best_model_at_end:
        raise ConfigError(
            "load_best_model_at_end loads a model without its seeds; leave it out: GrowCallback "
            "restores the best evaluation itself"
        )


def _check_unused(args: Any, model: nn.Module) -> None:
    """Several processes must not wait for gradients of blocks that come later."""
    unused = args.ddp_find_unused_parameters
    if args.world_size > 1 and unused is None:
        unused = not getattr(model, "is_gradient_checkpointing", False)
    if args.world_size > 1 and not unused:
        raise ConfigError(
            "with several processes growth in depth needs ddp_find_unused_parameters=True in the "
            "training arguments, without gradient checkpointing or with use_reentrant=False"
        )


def _evaluations(args: Any, state: Any) -> int:
    if args.eval_strategy == "epoch":
        return int(np.ceil(state.num_train_epochs))
    return int(state.max_steps // state.eval_steps)


def _example(loader: Any) -> Any:
    """A batch of two, without the loader itself, whose random state would change."""
    with keeping_generators():
        data = loader.dataset
        rows = [data[0], data[1]] if hasattr(data, "__getitem__") else [next(iter(data))] * 2
        batch = loader.collate_fn(rows)
    device = getattr(loader, "device", None)
    return {k: v if device is None else v.to(device) for k, v in batch.items()}


def _layouts(model: nn.Module, example: Any) -> dict[str, str]:
    """The layout (batch, positions, channels) for modules whose layout is not known."""
    unclear = [slot for slot in list_slots(model, example) if slot.layout == "?"]
    return {slot.name: "BTC" for slot in unclear if len(slot.shape) == 2}


def _is_causal(model: nn.Module) -> bool | None:
    return True if type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() else None


def _replace(path: Path, tree: Any) -> None:
    unfinished = path.with_name(f"{path.name}.unfinished")
    torch.save(tree, unfinished)
    os.replace(unfinished, path)
