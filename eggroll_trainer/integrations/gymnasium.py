"""Any gymnasium environment as a population fitness: `EpisodeReturn`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..checks import check_integer
from ..errors import ConfigurationError, FitnessError
from .episodes import Array, Worlds
from .returns import EpisodeFitness
from .workers import WorkerWorlds

try:
    import gymnasium
    from gymnasium import spaces
    from gymnasium.vector import AutoresetMode, VectorEnv
except ImportError as error:  # pragma: no cover - the message is what matters
    raise ImportError('this needs gymnasium: pip install "eggroll-trainer[rl]"') from error

MakeEnv = Callable[[], Any]


class EpisodeReturn(EpisodeFitness):
    """The mean return of episodes in a gymnasium environment.

    Args:
        env: An id that `gymnasium.make` knows, or a function that returns an environment, wrapped
            as you like; or one that returns a `VectorEnv`, in any autoreset mode.
        episodes: Of each member, each generation.
        max_steps: As for `EpisodeFitness`, on top of the environment's own limit.
        common_seeds: As for `EpisodeFitness`.
        action: What becomes of the policy's outputs `(n, …)`, as NumPy: `"auto"` clips them to a
            `Box`, and takes the largest of a `Discrete` space (of each part of a `MultiDiscrete`
            one; positive is 1 of a `MultiBinary` one). Or a function to actions, one a row.
        num_envs: Environments that there are at once; from 8 on (in each process), no bit of the
            results depends on it. 64 keeps the policy's calls well filled.
        workers: Processes that share them evenly; 0 has them in this one, which is best where a
            step takes a few microseconds. Else, one for each core.
        flatten: Flatten dict and tuple observations into one vector.
        env_kwargs: Of `gymnasium.make`, for an id.

    Raises:
        ConfigurationError: If an argument is wrong, or the environment's spaces are none of these.

    Example:
        >>> fitness = EpisodeReturn("CartPole-v1", max_steps=100)
        >>> policy = Policy(4, 2, hidden=(), discrete=True)
        >>> trainer = EGGROLLTrainer(policy.parameters(), policy, fitness, 16, sigma=0.5, seed=0)
        >>> result = trainer.train(2, verbose=False)
    """

    def __init__(
        self,
        env: str | MakeEnv,
        episodes: int = 1,
        max_steps: int | Callable[[int], int] | None = None,
        common_seeds: bool = True,
        action: str | Callable[[Array], Any] = "auto",
        num_envs: int = 64,
        workers: int = 0,
        flatten: bool = False,
        env_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        check_integer("num_envs", num_envs, at_least=1)
        check_integer("workers", workers, at_least=0)
        if action != "auto" and not callable(action):
            raise ConfigurationError(f'action={action!r}: expected "auto" or a function')
        self._make_env = _maker(env, flatten, env_kwargs or {})
        self._action, self._num_envs, self._workers = action, num_envs, workers
        super().__init__(self._worlds_of_env, episodes, max_steps, common_seeds)

    def _worlds_of_env(self) -> list[Worlds]:
        first = self._make_env()
        if isinstance(first, VectorEnv):
            convert = _converter(first.single_action_space, self._action)
            return [VectorWorlds(first, convert)]
        _check_observations(first.observation_space)
        convert = _converter(first.action_space, self._action)
        if not self._workers:
            envs = [first, *(self._make_env() for _ in range(self._num_envs - 1))]
            return [EnvWorlds(envs, convert)]
        first.close()
        each = -(-self._num_envs // self._workers)
        return [WorkerWorlds(self._make_env, each, convert) for _ in range(self._workers)]


class EnvWorlds(Worlds):
    """Environments of this process, one after another.

    Args:
        envs: The environments.
        convert: The policies' outputs `(n, …)` → actions, one a row.
    """

    def __init__(self, envs: Sequence[Any], convert: Callable[[Array], Any]) -> None:
        self.envs, self.convert = list(envs), convert
        self.capacity = len(envs)
        self.seeds: list[int] = []

    def reset(self, seeds: Sequence[int]) -> Array:
        """Begin an episode in each of the first environments."""
        self.seeds = list(seeds)
        return np.stack([self._call(i, "reset", seed=seed)[0] for i, seed in enumerate(seeds)])

    def step(self, worlds: Array, actions: Array) -> tuple[Array, Array, Array, Array]:
        """Step some of them."""
        pairs = zip(worlds, self.convert(actions), strict=True)
        results = [self._call(int(i), "step", action) for i, action in pairs]
        observations, rewards, terminated, truncated, _ = zip(*results, strict=True)
        return (
            np.stack(observations),
            np.array(rewards, dtype=float),
            np.array(terminated, dtype=bool),
            np.array(truncated, dtype=bool),
        )

    def _call(self, index: int, method: str, *args: Any, **kwargs: Any) -> Any:
        env = self.envs[index]
        try:
            return getattr(env, method)(*args, **kwargs)
        except Exception as error:
            name = env.spec.id if env.spec is not None else type(env.unwrapped).__name__
            raise FitnessError(
                f"environment {name}, in the episode of seed {self.seeds[index]}, raised "
                f"{type(error).__name__}: {error}"
            ) from error

    def close(self) -> None:
        """Close every environment."""
        for env in self.envs:
            env.close()


class VectorWorlds(Worlds):
    """A `VectorEnv` of the user's.

    Each world plays from one reset to its first end. What it does after that, while others play on,
    is another episode or part of one, as its autoreset mode has it: that is left out.

    Args:
        env: The environment.
        convert: The policies' outputs → actions.
    """

    def __init__(self, env: Any, convert: Callable[[Array], Any]) -> None:
        self.env, self.convert = env, convert
        self.capacity = env.num_envs
        self.disabled = env.metadata.get("autoreset_mode") == AutoresetMode.DISABLED
        self.actions: Any = None

    def reset(self, seeds: Sequence[int]) -> Array:
        """Begin an episode in each world; those that are not wanted repeat the last seed."""
        spare = self.env.num_envs - len(seeds)
        observations, _ = self.env.reset(seed=[*seeds, *[seeds[-1]] * spare])
        self.actions = None
        return np.array(observations[: len(seeds)])

    def step(self, worlds: Array, actions: Array) -> tuple[Array, Array, Array, Array]:
        """Step all, and return those that are wanted."""
        converted = np.asarray(self.convert(actions))
        if self.actions is None:
            self.actions = np.repeat(converted[:1], self.env.num_envs, axis=0)
        self.actions[worlds] = converted
        observations, rewards, terminated, truncated, _ = self.env.step(self.actions)
        results = tuple(np.array(x[worlds]) for x in (observations, rewards, terminated, truncated))
        if self.disabled and (ended := np.asarray(terminated | truncated)).any():
            self.env.reset(options={"reset_mask": ended})
        return results  # type: ignore[return-value]

    def close(self) -> None:
        """Close it."""
        self.env.close()


def _maker(env: str | MakeEnv, flatten: bool, env_kwargs: Mapping[str, Any]) -> MakeEnv:
    if isinstance(env, str):
        try:
            gymnasium.spec(env)
        except gymnasium.error.Error as error:
            raise ConfigurationError(f"env={env!r}: {error}") from error
    elif not callable(env):
        raise ConfigurationError(f"env={env!r}: expected an id, or a function that makes one")

    def make() -> Any:
        made = gymnasium.make(env, **env_kwargs) if isinstance(env, str) else env()
        if flatten:
            return gymnasium.wrappers.FlattenObservation(made)
        return made

    return make


def _check_observations(space: Any) -> None:
    if not isinstance(
        space, (spaces.Box, spaces.Discrete, spaces.MultiBinary, spaces.MultiDiscrete)
    ):
        raise ConfigurationError(
            f"observations of {space} are no single array: pass flatten=True to make them one"
        )


def _converter(space: Any, action: str | Callable[[Array], Any]) -> Callable[[Array], Any]:
    """The policies' outputs `(n, …)` → actions in a space, one a row."""
    if callable(action):
        return action
    if isinstance(space, spaces.Box):
        return BoxActions(space)
    if isinstance(space, spaces.Discrete):
        return DiscreteActions(space)
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
        return MultiDiscreteActions(space)
    if isinstance(space, spaces.MultiBinary):
        return BinaryActions(space)
    raise ConfigurationError(f"actions of {space}: pass action=, a function to actions")


class Actions:
    """Outputs to actions in a space.

    Args:
        space: The space.
        width: The outputs' shape that it needs.
    """

    def __init__(self, space: Any, width: tuple[int, ...]) -> None:
        self.space, self.width = space, width

    def check(self, outputs: Array) -> None:
        """Raise unless the outputs fit."""
        if outputs.shape[1:] != self.width:
            raise ConfigurationError(
                f"the policy returns {outputs.shape[1:]} for each observation, and the action "
                f"space {self.space} needs {self.width}"
            )


class BoxActions(Actions):
    """Clipped to the bounds."""

    def __init__(self, space: Any) -> None:
        super().__init__(space, space.shape)

    def __call__(self, outputs: Array) -> Array:
        """Convert."""
        self.check(outputs)
        clipped: Array = np.clip(outputs, self.space.low, self.space.high)
        return clipped.astype(self.space.dtype)


class DiscreteActions(Actions):
    """The largest output."""

    def __init__(self, space: Any) -> None:
        super().__init__(space, (int(space.n),))

    def __call__(self, outputs: Array) -> list[int]:
        """Convert."""
        self.check(outputs)
        found: list[int] = (outputs.argmax(axis=1) + int(self.space.start)).tolist()
        return found


class MultiDiscreteActions(Actions):
    """The largest output of each part."""

    def __init__(self, space: Any) -> None:
        super().__init__(space, (int(space.nvec.sum()),))

    def __call__(self, outputs: Array) -> Array:
        """Convert."""
        self.check(outputs)
        parts = np.split(outputs, np.cumsum(self.space.nvec)[:-1], axis=1)
        found: Array = np.stack([part.argmax(axis=1) for part in parts], axis=1)
        shifted: Array = found + self.space.start
        return shifted


class BinaryActions(Actions):
    """Whether outputs are positive."""

    def __init__(self, space: Any) -> None:
        super().__init__(space, space.shape)

    def __call__(self, outputs: Array) -> Array:
        """Convert."""
        self.check(outputs)
        positive: Array = outputs > 0
        return positive.astype(self.space.dtype)
