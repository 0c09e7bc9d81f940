"""The weights that a run has started from: model.weights."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from launcher.config.messages import program
from launcher.engine.flat.names import named_parameters
from launcher.errors import ConfigError, listed
from launcher.run_dir.result import Result
from launcher.training.run import Run
from launcher.training.setup.initial_weights import SHOWN, Loaded


class InitialWeights:
    """Reports and records the weights that were `loaded`, None where the config names no file."""

    def __init__(self, run: Run, loaded: Loaded | None) -> None:
        self._run = run
        self._loaded = loaded
        self._started_from: tuple[str, str] | None = None  # model.weights, and the SHA-256 that the file had

    def state(self) -> dict[str, Any]:
        return {"started_from": self._started_from}

    def load_state(self, values: dict[str, Any]) -> None:
        if (saved := values["started_from"]) is not None:
            self._started_from = tuple(saved)

    def check(self, resumed: bool) -> None:
        """Report what the run starts from. All ranks call it.

        `resumed`: from a checkpoint, whose weights have replaced those of the file. Otherwise raises
        ConfigError, on all ranks, for a file that cannot be used.
        """
        loaded, model = self._loaded, self._run.config.model
        if loaded is not None and resumed:
            self._run.telemetry.decision("weights", f"of the checkpoint, not of model.weights={loaded.file}")
        elif loaded is not None:
            if loaded.error:
                raise ConfigError(loaded.error)
            self._started_from = (loaded.file, loaded.sha256)
            self._report(loaded)
        if self._started_from is not None and self._started_from[0] == model.weights:
            self._run.recorded.change(model=replace(model, weights_sha256=self._started_from[1]))

    def add_to(self, result: Result) -> Result:
        if self._started_from is None:
            return result
        file, digest = self._started_from
        return replace(result, started_from={"file": file, "sha256": digest})

    def _report(self, loaded: Loaded) -> None:
        telemetry, model = self._run.telemetry, self._run.stepper.model
        fields = asdict(loaded)
        del fields["error"]
        telemetry.decision("weights", loaded.sentence, **fields | {"loaded": len(loaded.loaded)})
        if loaded.rounded:
            telemetry.warn(
                f"model.weights={loaded.file} holds {loaded.rounded} values: the fp32 masters start from "
                "rounded weights. Export in fp32 where the run still exists: "
                f"{program()} export RUN FILE"
            )
        frozen = [name for name, p in named_parameters(model).items() if not p.requires_grad]
        random = {*loaded.missing, *(text.partition(" ")[0] for text in loaded.misfits)}
        if idle := [name for name in frozen if name in random]:
            telemetry.warn(
                f"{listed(idle, SHOWN)} {'is' if len(idle) == 1 else 'are'} frozen and not in "
                f"model.weights={loaded.file}: they keep the random values that the recipe built. Do not "
                "freeze them, or give a file that has them."
            )
