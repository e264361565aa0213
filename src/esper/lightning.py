"""Growth inside a Lightning Trainer.

grow = esper.lightning.Grow(slots=["net.1"], monitor="val_acc", example=x)
Trainer(max_epochs=30, callbacks=[grow]).fit(module, train, val)
plain = grow.export()
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from esper.api import Body, Slots, attach
from esper.api.distributed import check_wrapper
from esper.api.slots import as_slots
from esper.growth.devices import devices_of, keeping_generators
from esper.growth.grown_module import GrownModule
from esper.growth.hooks import SEEDS_SAVED, clear_flag, set_flag
from esper.growth.sites import SlotChoice, evaluating
from esper.growth.snapshot import restore_snapshot, snapshot_from_tree
from esper.growth.stacks import Stacks
from esper.leyline import ConfigError, EsperWarning, ForgottenCallError, PackageMissingError
from esper.leyline.depth import AUTO, Depth

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.data import extract_batch_size
except ModuleNotFoundError as error:
    raise PackageMissingError(f"esper.lightning needs {error.name}", "lightning") from None


# In the callback's state before the first validation: weights of the blocks that were there.
BLOCKS_ALONE = "blocks"


class Grow(Callback):
    """Grows a LightningModule, or its submodule `module`, while a Trainer fits it.

    `slots`, `depth` and `options` (`controller`, `budget`, `key`, `settings`) are those of
    `esper.attach`.
    `monitor` is a metric that validation logs; every validation is a step. `example` is one input
    of the module that grows (default: `example_input_array`). `steps` is the maximum number of
    validations (default: the Trainer's `max_epochs`). `seed_lr` and `seed_weight_decay` are for
    seeds.

    To measure what a seed contributes, validation is repeated without it, with the module's
    `validation_step` or with `evaluate(module)`, if given. After `fit` the module is at its best
    epoch. With `strategy="ddp"` the processes grow in step; scores are means over the processes.
    Checkpoints include the growth; `fit`, `validate` and `test` with this callback restore it from
    `ckpt_path`. Raises ConfigError for arguments that cannot work.
    """

    def __init__(
        self,
        slots: SlotChoice | Slots = AUTO,
        monitor: str | None = None,
        *,
        depth: Depth | str | None = None,
        mode: Literal["max", "min"] = "max",
        example: Any = None,
        module: str | None = None,
        steps: int | None = None,
        evaluate: Callable[[LightningModule], float] | None = None,
        seed_lr: float | None = None,
        seed_weight_decay: float | None = None,
        **options: Any,
    ) -> None:
        if mode not in ("max", "min"):
            raise ConfigError(f"mode must be 'max' or 'min', got {mode!r}")
        if not isinstance(monitor, str):
            raise ConfigError(f"monitor must be the name of a metric, got {type(monitor).__name__}")
        self.slots, self.monitor, self.mode = as_slots(slots, depth), monitor, mode
        self.example, self.module, self.steps = example, module, steps
        self.evaluate, self.options = evaluate, options
        self.seed_settings = {"seed_lr": seed_lr, "seed_weight_decay": seed_weight_decay}
        self.body: Body | None = None
        self._saved: dict[str, Any] | None = None
        self._repeated = False

    def export(self) -> nn.Module:
        """The grown module as a plain module that needs no Esper."""
        if self.body is None:
            raise ForgottenCallError("trainer.fit was never called with this Grow callback")
        return self.body.export()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """A checkpoint may be loaded into the module before its blocks have come."""
        if stage != TrainerFn.FITTING and (stacks := self._stacks()) is not None:
            stacks.give_all()

    def _stacks(self) -> Stacks | None:
        return None if self.body is None else self.body.model.stacks

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _check_trainer(trainer)
        grows = self._growing(pl_module)
        self.body = attach(
            grows,
            slots=self.slots,
            example=self._example(trainer, pl_module),
            evaluate=lambda: self._measure(trainer, pl_module),
            steps=self.steps or _validations(trainer),
            **self.options,
        )
        with self.body.model.given_back():
            check_wrapper(trainer.strategy.model, self.body.model)
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self.body.manage(trainer.optimizers[0], *schedulers, **self.seed_settings)
        set_flag(grows, SEEDS_SAVED)
        self._repeated = self.evaluate is not None
        if self._saved and BLOCKS_ALONE in self._saved:
            self.body.load_weights(self._saved[BLOCKS_ALONE])
            self._saved = None
        if self._saved:
            self.body.load_state_dict(self._saved)
            self._saved, self._repeated = None, True

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """After a validation the Trainer gives modules their mode back by their names, and blocks
        that come in between change those."""
        if (stacks := self._stacks()) is not None:
            stacks.follow_mode()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING or self.body is None:
            return
        score = self._monitored(trainer)
        if trainer.sanity_checking:
            return
        # Parameters that are created in inference mode cannot be trained.
        with torch.inference_mode(False), torch.enable_grad():
            if not self._repeated:
                self._check_repeatable(trainer, pl_module, score)
            self.body.step(score)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.body is not None and self.body.begun:
            self.body.finish()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.body is not None:
            self.body.model.to(pl_module.device)  # the Trainer may have moved the module
            clear_flag(self.body.model.host, SEEDS_SAVED)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if self.body is not None:
            self.body.close()

    def state_dict(self) -> dict[str, Any]:
        if self.body is None:
            return {}
        if self.body.begun:
            return self.body.state_dict()
        deepens = self.body.model.stacks is not None
        return {BLOCKS_ALONE: self.body.model.host.state_dict()} if deepens else {}

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Lightning loads the module's weights before its blocks have come."""
        if (stacks := self._stacks()) is not None:
            with stacks.as_given():
                checkpoint["state_dict"] = trainer.strategy.lightning_module_state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Lightning restores callbacks before the optimizers exist; `on_fit_start` loads it."""
        self._saved = state_dict or None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the seeds of a checkpoint, unless it is trained further."""
        if trainer.state.fn == TrainerFn.FITTING:
            return
        if self._saved is None:
            if (stacks := self._stacks()) is not None:
                stacks.put_back()
            return
        with torch.inference_mode(False), torch.enable_grad():
            if self.body is not None:
                self.body.load_state_dict(self._saved)
            else:
                spec = self.slots
                network = GrownModule.wrap(
                    self._growing(pl_module),
                    spec.modules,
                    self._example(trainer, pl_module),
                    spec.blueprints,
                    layout=spec.layout,
                    causal=spec.causal,
                )
                (now,) = self._saved["cycle"]["now"]
                restore_snapshot(network, None, snapshot_from_tree(now["host"]))
        self._saved = None

    on_test_start = on_predict_start = on_validation_start

    def _growing(self, pl_module: LightningModule) -> nn.Module:
        if self.module is None:
            return pl_module
        modules = dict(pl_module.named_modules())
        if self.module not in modules:
            children = ", ".join(name for name, _ in pl_module.named_children())
            raise ConfigError(
                f"{type(pl_module).__name__} has no module {self.module!r}; it has {children}"
            )
        return modules[self.module]

    def _example(self, trainer: Trainer, pl_module: LightningModule) -> Any:
        example = self.example
        if example is None and self.module is None:
            example = pl_module.example_input_array
        if example is None:
            raise ConfigError(
                "Grow needs one input of the module that grows: give example=x, or set "
                "example_input_array in the LightningModule"
            )
        return trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(example))

    def _monitored(self, trainer: Trainer) -> float:
        found = trainer.callback_metrics
        if self.monitor not in found:
            there = f"there are {', '.join(found)}" if found else "nothing is logged"
            raise ConfigError(
                f"validation logs no metric {self.monitor!r} ({there}); log it in validation_step, "
                "or give another monitor"
            )
        return self._signed(float(found[self.monitor]))

    def _signed(self, value: float) -> float:
        return value if self.mode == "max" else -value

    def _measure(self, trainer: Trainer, pl_module: LightningModule) -> float:
        if self.evaluate is not None:
            return self._signed(float(self.evaluate(pl_module)))
        logged = repeat_validation(trainer, pl_module)
        if self.monitor not in logged:
            raise ConfigError(
                f"{self.monitor!r} is not logged by the module itself, so validation cannot be "
                "repeated without a seed; give evaluate=, a function of the module"
            )
        return self._signed(logged[self.monitor])

    def _check_repeatable(self, trainer: Trainer, pl_module: LightningModule, score: float) -> None:
        """Warn if a repeated validation gives another score: seeds are measured by repetitions."""
        assert self.body is not None
        with evaluating(self.body.model), keeping_generators(devices_of(pl_module)):
            repeated = self._measure(trainer, pl_module)
        # With several processes the metric may be that of each process, or of all.
        score, repeated = self.body.processes.mean(np.array([score, repeated])).tolist()
        self._repeated = True
        if not abs(repeated - score) <= 1e-3 * max(1.0, abs(score)):
            warnings.warn(
                f"validation gave {self.monitor} {self._signed(score):.6g}, and its repetition "
                f"{self._signed(repeated):.6g}; unless validation is random, give evaluate=, a "
                "function of the module",
                EsperWarning,
                stacklevel=2,
            )


def repeat_validation(trainer: Trainer, pl_module: LightningModule) -> dict[str, float]:
    """The metrics that a module logs in a pass over the validation data, reduced like the Trainer
    does, without calls to callbacks and loggers. The module must be in evaluation mode."""
    loaders = _loaders(trainer.val_dataloaders)
    logged = _Logged(several=len(loaders) > 1)
    takes = len(signature(pl_module.validation_step).parameters)
    with torch.no_grad(), _logging_to(pl_module, logged):
        pl_module.on_validation_epoch_start()
        for number, loader in enumerate(loaders):
            most = trainer.num_val_batches[number]
            batches = loader if most == float("inf") else islice(loader, int(most))
            for index, batch in enumerate(batches):
                batch = trainer.precision_plugin.convert_input(batch)
                batch = trainer.strategy.batch_to_device(batch, dataloader_idx=number)
                logged.batch, logged.loader = batch, number
                trainer.strategy.validation_step(*(batch, index, number)[:takes])
            logged.settle_metrics()
        logged.batch = logged.loader = None
        pl_module.on_validation_epoch_end()
        logged.settle_metrics()
    return logged.reduced()


class _Logged:
    """The logged metrics of a module, and values with their weights, by name."""

    def __init__(self, several: bool) -> None:
        self.several = several
        self.batch: Any = None
        self.loader: int | None = None
        self.values: dict[str, list[tuple[Tensor, int]]] = {}
        self.metrics: dict[str, Any] = {}
        self.reductions: dict[str, Any] = {}

    def log(
        self,
        name: str,
        value: Any,
        *shown: bool,
        reduce_fx: Any = "mean",
        batch_size: int | None = None,
        add_dataloader_idx: bool = True,
        **unused: Any,
    ) -> None:
        if self.several and add_dataloader_idx and self.loader is not None:
            name = f"{name}/dataloader_idx_{self.loader}"
        if hasattr(value, "compute") and hasattr(value, "reset"):
            self.metrics[name] = value
            return
        weight = batch_size or (1 if self.batch is None else extract_batch_size(self.batch))
        value = torch.as_tensor(value, dtype=torch.float32).detach().cpu()
        self.values.setdefault(name, []).append((value, weight))
        self.reductions[name] = getattr(reduce_fx, "__name__", reduce_fx)

    def settle_metrics(self) -> None:
        """After each loader, like the Trainer: the next loader may use the same metric."""
        for name, metric in self.metrics.items():
            self.values[name] = [(metric.compute().detach().cpu(), 1)]
            self.reductions[name] = "mean"
            metric.reset()
        self.metrics = {}

    def reduced(self) -> dict[str, float]:
        found = {}
        for name, pairs in self.values.items():
            values = torch.stack([value for value, _ in pairs])
            if self.reductions[name] == "mean":
                weights = torch.tensor([weight for _, weight in pairs])
                found[name] = float((values * weights).sum() / weights.sum())
            else:
                found[name] = float(getattr(torch, self.reductions[name])(values))
        return found


@contextmanager
def _logging_to(pl_module: LightningModule, logged: _Logged) -> Iterator[None]:
    # On the instance, where `log_dict` and others find it.
    pl_module.log = logged.log
    try:
        yield
    finally:
        del pl_module.log


def _loaders(given: Any) -> list[Any]:
    if isinstance(given, Mapping):
        return list(given.values())
    return list(given) if isinstance(given, list | tuple) else [given]


def _check_trainer(trainer: Trainer) -> None:
    if len(trainer.optimizers) != 1:
        raise ConfigError(
            f"Grow needs one optimizer, but configure_optimizers gave {len(trainer.optimizers)}"
        )
    if trainer.world_size > 1 and not isinstance(trainer.strategy, DDPStrategy):
        raise ConfigError(
            "on several devices Grow needs a whole model in each process, which "
            f"{type(trainer.strategy).__name__} does not keep; give strategy='ddp'"
        )
    if not trainer.enable_validation:
        raise ConfigError(
            "Grow needs validation; give fit a validation loader, and the module a validation_step"
        )
    for callback in trainer.checkpoint_callbacks:
        if getattr(callback, "save_weights_only", False):
            raise ConfigError(
                "ModelCheckpoint(save_weights_only=True) saves no seeds; leave out "
                "save_weights_only, or save the result of export()"
            )


def _validations(trainer: Trainer) -> int:
    often = trainer.val_check_interval != 1.0 or trainer.check_val_every_n_epoch != 1
    if often or trainer.max_epochs is None or trainer.max_epochs < 1:
        raise ConfigError(
            "the number of validations does not follow from max_epochs; give it as steps="
        )
    return int(trainer.max_epochs)
