"""`EpisodeReturn`: returns counted right, whatever holds the environments."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from eggroll_trainer import ConfigurationError, EGGROLLTrainer, FitnessError
from eggroll_trainer.policies import Policy, RecurrentPolicy

gymnasium = pytest.importorskip("gymnasium")
from gymnasium import spaces  # noqa: E402
from gymnasium.vector import AutoresetMode, SyncVectorEnv  # noqa: E402

from eggroll_trainer.integrations.gymnasium import EpisodeReturn, _converter  # noqa: E402
from eggroll_trainer.integrations.returns import _episode_seed  # noqa: E402


class Corridor(gymnasium.Env):  # type: ignore[misc]
    """A walk from a random place; it ends at 3, or is cut off after ten steps.

    The reward of a step is the place it leads to; observations after a reset are marked by −100.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.steps = float(self.np_random.uniform(-1, 1)), 0
        return np.array([self.place, -100.0]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert action in self.action_space
        self.place, self.steps = self.place + float(action[0]), self.steps + 1
        reward = self.place
        if self.steps == 3:
            if self.fault == "raise":
                raise RuntimeError("the motor burns")
            if self.fault == "exit":
                os._exit(3)
            if self.fault == "nan":
                reward = float("nan")
        observation = np.array([self.place, float(self.steps)])
        return observation, reward, self.place >= 3, self.steps >= 10, {}


class Marked(nn.Module):
    """A linear policy that would fall apart if it saw the mark of a reset in mid-episode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * torch.tensor([1.0, 0.1]))


def make_trainer(fitness: Any, policy: nn.Module | None = None, **options: Any) -> EGGROLLTrainer:
    policy = policy or Marked()
    torch.manual_seed(0)
    for parameter in policy.parameters():
        nn.init.normal_(parameter, std=0.5)
    options = {"population_size": 16, "sigma": 0.5, "seed": 3, **options}
    return EGGROLLTrainer(policy.parameters(), policy, fitness, **options)


def by_hand(trainer: EGGROLLTrainer, seeds: list[list[int]]) -> list[float]:
    """Each member's mean return, one environment and one step at a time."""
    population, env, returns = trainer.ask(), Corridor(), []
    for index, own in enumerate(seeds):
        member = population.member(index)
        total = 0.0
        for seed in own:
            observation, _ = env.reset(seed=seed)
            ended = False
            while not ended:
                with torch.no_grad():
                    action = member(torch.tensor(observation)[None].float())[0].numpy()
                observation, reward, terminated, truncated, _ = env.step(action.clip(-1, 1))
                total, ended = total + reward, terminated or truncated
        returns.append(total / len(own))
    return returns


def vector(mode: AutoresetMode, num: int) -> Any:
    return lambda: SyncVectorEnv([Corridor] * num, autoreset_mode=mode)


@pytest.mark.parametrize("common_seeds", [True, False])
@pytest.mark.parametrize("episodes", [1, 3])
@pytest.mark.parametrize("env", [Corridor, *AutoresetMode])
def test_returns_are_those_counted_by_hand(env: Any, episodes: int, common_seeds: bool) -> None:
    make = vector(env, 48) if isinstance(env, AutoresetMode) else env
    fitness = EpisodeReturn(make, episodes, common_seeds=common_seeds, num_envs=48)
    trainer = make_trainer(fitness)
    population = trainer.ask()
    seeds = fitness._seeds(population).tolist()
    scores = trainer.evaluate(population)
    np.testing.assert_allclose(scores, by_hand(trainer, seeds), rtol=1e-5, atol=1e-5)
    assert len({tuple(row) for row in seeds}) == (1 if common_seeds else 8)  # pairs share theirs
    assert seeds[::2] == seeds[1::2]
    trainer.tell(scores)
    played = trainer.history[0]
    assert 1 <= played["episode_length"] <= 10
    assert played["steps"] == played["episode_length"] * 16 * episodes


def test_each_generation_has_new_episodes_which_the_seed_decides() -> None:
    fitness = EpisodeReturn(Corridor)
    runs = []
    for seed in (3, 3, 4):
        trainer = make_trainer(fitness, seed=seed)
        runs.append([fitness._seeds(trainer.ask())[0, 0]])
        trainer.step()
        runs[-1].append(fitness._seeds(trainer.ask())[0, 0])
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1]


@pytest.mark.parametrize(
    "options",
    [
        {"num_envs": 8},
        {"num_envs": 11},
        {"num_envs": 100},
        {"workers": 2, "num_envs": 17},
        {"workers": 3, "num_envs": 24},
    ],
)
def test_results_do_not_depend_on_what_holds_the_environments(options: Any) -> None:
    """Bit for bit, with statistics and over generations."""
    results = []
    for some in ({"num_envs": 32}, options):
        fitness = EpisodeReturn(Corridor, episodes=2, **some)
        trainer = make_trainer(fitness, Policy(2, 1, hidden=(8,)))
        trainer.train(3, verbose=False)
        results.append((trainer.fitness_history, trainer.model.state_dict()))
        fitness.close()
    assert results[0][0] == results[1][0]
    for name, tensor in results[0][1].items():
        assert torch.equal(tensor, results[1][1][name]), name


def test_equal_members_meet_equal_episodes() -> None:
    trainer = make_trainer(EpisodeReturn(Corridor, episodes=2), sigma=1e-30)
    scores = trainer.evaluate(trainer.ask())
    assert len(set(scores.tolist())) == 1


def test_statistics_are_of_what_was_acted_on_and_change_between_generations() -> None:
    seen: list[Any] = []

    class Watched(Corridor):
        def reset(self, **options: Any) -> Any:
            self.last, info = super().reset(**options)
            return self.last, info

        def step(self, action: Any) -> Any:
            seen.append(self.last)
            self.last, *rest = super().step(action)
            return (self.last, *rest)

    policy = Policy(2, 1, hidden=())
    fitness = EpisodeReturn(Watched)
    trainer = make_trainer(fitness, policy)
    population = trainer.ask()
    first = trainer.evaluate(population)
    seen_once = len(seen)
    assert torch.equal(trainer.evaluate(population), first), "frozen within a generation"
    assert policy.normalize.count == 0
    trainer.tell(first)
    observations = torch.tensor(np.array(seen[:seen_once]))
    assert policy.normalize.count == seen_once, "each generation once, however often it is scored"
    torch.testing.assert_close(policy.normalize.mean, observations.mean(dim=0))
    torch.testing.assert_close(policy.normalize.variance, observations.var(dim=0, correction=0))
    fitness.evaluate(policy, 5)
    assert policy.normalize.count == seen_once, "an evaluation teaches nothing"


def test_a_run_resumes_bit_for_bit_with_its_statistics(tmp_path: Path) -> None:
    def fresh() -> EGGROLLTrainer:
        return make_trainer(EpisodeReturn(Corridor), Policy(2, 1, hidden=(4,)))

    whole, half, rest = fresh(), fresh(), fresh()
    whole.train(6, verbose=False)
    half.train(3, verbose=False)
    half.save(tmp_path / "run.pt")
    rest.train(6, verbose=False, resume_from=tmp_path / "run.pt")
    assert rest.fitness_history == whole.fitness_history
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, rest.model.state_dict()[name]), name


def test_evaluation_is_what_the_file_does_step_by_step_in_another_process(tmp_path: Path) -> None:
    """By `Policy.load` and gymnasium alone, as whoever uses the policy would write it."""
    policy = Policy(3, 1, hidden=(8,), low=-2.0, high=2.0, squash=False)
    fitness = EpisodeReturn("Pendulum-v1", num_envs=3)
    make_trainer(fitness, policy).train(2, verbose=False)
    policy.save(tmp_path / "policy.pt")
    seeds = [_episode_seed(5, "evaluation", e) for e in range(4)]
    code = f"""
import gymnasium
from eggroll_trainer.policies import Policy
policy, env = Policy.load("policy.pt"), gymnasium.make("Pendulum-v1")
for seed in {seeds}:
    observation, _ = env.reset(seed=seed)
    total, ended = 0.0, False
    while not ended:
        observation, reward, terminated, truncated, _ = env.step(policy.act(observation))
        total, ended = total + reward, terminated or truncated
    print(total)
"""
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    result = fitness.evaluate(policy, 4, seed=5)
    np.testing.assert_allclose(result.returns, [float(x) for x in shown.split()], rtol=1e-3)
    assert len(set(shown.split())) == 4
    assert (result.lengths == 200).all()


def test_a_memory_is_each_members_own() -> None:
    class Memory(RecurrentPolicy):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRUCell(2, 3), nn.Linear(3, 1)

        def initial_state(self, rows: int) -> Any:
            return torch.zeros(rows, 3)

        def forward(self, x: Tensor, state: Tensor) -> Any:
            state = self.cell(x, state)
            return self.head(state), state

    trainer = make_trainer(EpisodeReturn(Corridor), Memory())
    population = trainer.ask()
    together = trainer.evaluate(population)
    slow = make_trainer(EpisodeReturn(Corridor), Memory(), evaluation="sequential")
    np.testing.assert_allclose(together, slow.evaluate(slow.ask()), rtol=1e-5)


def test_episodes_that_grow() -> None:
    trainer = make_trainer(EpisodeReturn(Corridor, max_steps=lambda generation: 1 + generation))
    trainer.train(3, verbose=False)
    assert [metrics["episode_length"] for metrics in trainer.history] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("space", "outputs", "expected"),
    [
        (spaces.Box(-1.0, 2.0, (2,)), [[-3.0, 5.0]], [[-1.0, 2.0]]),
        (spaces.Discrete(3, start=5), [[0.0, 2.0, 1.0]], [6]),
        (spaces.MultiDiscrete([2, 3]), [[0.0, 2.0, 4.0, 1.0, 0.0]], [[1, 0]]),
        (spaces.MultiBinary(3), [[-1.0, 2.0, 0.0]], [[0, 1, 0]]),
    ],
)
def test_outputs_become_actions_of_the_space(space: Any, outputs: Any, expected: Any) -> None:
    convert = _converter(space, "auto")
    actions = convert(np.array(outputs, dtype=np.float32))
    assert np.asarray(actions).tolist() == expected
    assert actions[0] in space
    with pytest.raises(ConfigurationError, match="action space"):
        convert(np.zeros((1, 7), dtype=np.float32))


def test_dict_observations_are_flattened_on_request() -> None:
    class Named(Corridor):
        observation_space = spaces.Dict({"place": Corridor.observation_space})

        def reset(self, **options: Any) -> Any:
            observation, info = super().reset(**options)
            return {"place": observation}, info

        def step(self, action: Any) -> Any:
            observation, *rest = super().step(action)
            return ({"place": observation}, *rest)

    flat = make_trainer(EpisodeReturn(Named, flatten=True))
    plain = make_trainer(EpisodeReturn(Corridor))
    assert torch.equal(flat.evaluate(flat.ask()), plain.evaluate(plain.ask()))
    trainer = make_trainer(EpisodeReturn(Named))
    with pytest.raises(ConfigurationError, match="flatten=True"):
        trainer.step()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise", r"Corridor, in the episode of seed \d+, raised RuntimeError: the motor burns"),
        ("nan", r"member \d+: after 2 steps the environment gave the reward nan"),
    ],
)
def test_faults_of_an_environment(fault: str, message: str, workers: int) -> None:
    fitness = EpisodeReturn(lambda: Corridor(fault), workers=workers)
    trainer = make_trainer(fitness, Policy(2, 1, hidden=()))
    before = {name: x.clone() for name, x in trainer.model.state_dict().items()}
    with pytest.raises(FitnessError, match=message):
        trainer.train(2, verbose=False)
    assert trainer.generation == 0
    assert not multiprocessing.active_children()
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_process_that_dies() -> None:
    fitness = EpisodeReturn(lambda: Corridor("exit"), workers=2)
    with pytest.raises(FitnessError, match=r"process \S+ died, with the exit code 3"):
        make_trainer(fitness).step()
    assert not multiprocessing.active_children()


def test_a_killed_trainer_leaves_no_process(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import multiprocessing, os, signal\n"
        "import torch\n"
        "from eggroll_trainer import EGGROLLTrainer\n"
        "from eggroll_trainer.integrations.gymnasium import EpisodeReturn\n"
        "if __name__ == '__main__':\n"
        "    model = torch.nn.Linear(4, 2)\n"
        "    fitness = EpisodeReturn('CartPole-v1', workers=2, num_envs=16)\n"
        "    EGGROLLTrainer(model.parameters(), model, fitness, 8).train(1, verbose=False)\n"
        "    print(len(multiprocessing.active_children()), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    # The workers have its output open too: this comes back when the last of them has ended.
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "2\n"
    assert done.returncode == -signal.SIGKILL


def test_an_action_that_is_not_finite() -> None:
    class Broken(Marked):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / 0

    with pytest.raises(
        FitnessError, match=r"member 0: the policy returned the action \[.*(inf|nan)"
    ):
        make_trainer(EpisodeReturn(Corridor), Broken()).step()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"env": "NoSuchThing-v1"}, "NoSuchThing"),
        ({"env": 3}, "expected an id"),
        ({"env": Corridor, "episodes": 0}, "episodes=0"),
        ({"env": Corridor, "num_envs": 0}, "num_envs=0"),
        ({"env": Corridor, "workers": -1}, "workers=-1"),
        ({"env": Corridor, "max_steps": 0}, "max_steps=0"),
        ({"env": Corridor, "action": "clip"}, "action='clip'"),
    ],
)
def test_arguments_that_are_wrong(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        EpisodeReturn(**arguments)


def test_a_policy_that_does_not_fit_the_actions() -> None:
    with pytest.raises(ConfigurationError, match=r"returns \(2,\).*needs \(1,\)"):
        make_trainer(EpisodeReturn(Corridor), nn.Linear(2, 2)).step()


@pytest.mark.parametrize("name", ["gymnasium", "mujoco"])
def test_without_the_extra_its_name_is_said(name: str) -> None:
    code = f"import sys; sys.modules[{name!r}] = None; import eggroll_trainer.integrations.{name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert 'pip install "eggroll-trainer[rl]"' in done.stderr


def test_spawn_without_a_main_guard_says_so(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import multiprocessing\n"
        "import torch\n"
        "from eggroll_trainer import EGGROLLTrainer\n"
        "from eggroll_trainer.integrations.gymnasium import EpisodeReturn\n"
        "multiprocessing.set_start_method('spawn', force=True)\n"
        "model = torch.nn.Linear(4, 2)\n"
        "fitness = EpisodeReturn('CartPole-v1', workers=1, num_envs=8)\n"
        "EGGROLLTrainer(model.parameters(), model, fitness, 8).train(1)\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert 'if __name__ == "__main__":' in done.stderr


@pytest.mark.slow
def test_cartpole_is_learnt() -> None:
    torch.manual_seed(0)
    policy = Policy(4, 2, hidden=(), discrete=True)
    fitness = EpisodeReturn("CartPole-v1")
    untrained = fitness.evaluate(policy).returns.mean()
    trainer = EGGROLLTrainer(
        policy.parameters(), policy, fitness, 32, learning_rate=0.3, sigma=0.3, seed=0
    )
    trainer.train(12, verbose=False)
    assert untrained < 100
    assert fitness.evaluate(policy).returns.mean() > 450
