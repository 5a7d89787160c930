"""MuJoCo tasks: gymnasium's numbers, for a whole population."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from eggroll_trainer import ConfigurationError, EGGROLLTrainer, EggrollWarning
from eggroll_trainer.policies import Policy

gymnasium = pytest.importorskip("gymnasium")
pytest.importorskip("mujoco")

from eggroll_trainer.integrations.gymnasium import EpisodeReturn  # noqa: E402
from eggroll_trainer.integrations.mujoco import (  # noqa: E402
    MujocoReturn,
    MujocoTask,
    MujocoWorlds,
    State,
)
from eggroll_trainer.integrations.mujoco_tasks import TASKS, make_task  # noqa: E402

# gymnasium's own models use what MuJoCo has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")


@pytest.mark.parametrize("name", TASKS)
def test_step_by_step_as_gymnasium_has_it(name: str) -> None:
    """Whole episodes, several worlds at once, those that end left out."""
    seeds = [3, 4, 5]
    task = make_task(name)
    worlds = MujocoWorlds(task)
    envs = [gymnasium.make(f"{name}-v5") for _ in seeds]
    space = envs[0].action_space
    assert task.observation_size == envs[0].observation_space.shape[0]
    low, high = task.action_range
    np.testing.assert_array_equal(low, space.low)
    np.testing.assert_array_equal(high, space.high)
    space.seed(0)
    expected = [env.reset(seed=seed)[0] for env, seed in zip(envs, seeds, strict=True)]
    np.testing.assert_allclose(worlds.reset(seeds), expected, rtol=0, atol=1e-9)
    playing = np.arange(len(seeds))
    lengths = np.zeros(len(seeds), dtype=int)
    while len(playing):
        actions = np.stack([space.sample() for _ in playing])
        results = [envs[i].step(a)[:4] for i, a in zip(playing, actions, strict=True)]
        observations, rewards, terminated, truncated = worlds.step(playing, actions)
        lengths[playing] += 1
        for row, (observation, reward, ended, cut) in enumerate(results):
            np.testing.assert_allclose(observations[row], observation, rtol=1e-6, atol=1e-6)
            assert rewards[row] == pytest.approx(reward, rel=1e-6, abs=1e-6)
            assert (bool(terminated[row]), bool(truncated[row])) == (ended, cut)
        playing = playing[~(terminated | truncated)]
    assert lengths.max() > 5
    worlds.close()
    for env in envs:
        env.close()


def make_trainer(fitness: Any, policy: nn.Module, **options: Any) -> EGGROLLTrainer:
    options = {"population_size": 16, "sigma": 0.1, "seed": 3, **options}
    return EGGROLLTrainer(policy.parameters(), policy, fitness, **options)


def test_returns_are_those_of_the_gymnasium_environment() -> None:
    """The same episodes, by two ways in, with statistics and ends in the middle."""
    results = []
    for fitness in (MujocoReturn("Hopper", episodes=2), EpisodeReturn("Hopper-v5", episodes=2)):
        torch.manual_seed(0)
        policy = Policy(11, 3, hidden=(8,))
        trainer = make_trainer(fitness, policy)
        trainer.train(2, verbose=False)
        results.append((trainer, fitness.evaluate(policy, 3)))
        fitness.close()
    (mujoco, of_mujoco), (gym, of_gym) = results
    np.testing.assert_allclose(mujoco.fitness_history, gym.fitness_history, rtol=1e-6)
    assert [m["steps"] for m in mujoco.history] == [m["steps"] for m in gym.history]
    np.testing.assert_allclose(of_mujoco.returns, of_gym.returns, rtol=1e-5)
    assert np.array_equal(of_mujoco.lengths, of_gym.lengths)


def test_results_do_not_depend_on_threads() -> None:
    histories = []
    for threads in (1, 2, 5):
        torch.manual_seed(0)
        policy = Policy(27, 8, hidden=(8,))
        fitness = MujocoReturn(make_task("Ant", contacts=False), max_steps=40, threads=threads)
        trainer = make_trainer(fitness, policy)
        trainer.train(2, verbose=False)
        centre = fitness.evaluate(policy, 20, max_steps=40).returns
        histories.append((trainer.fitness_history, centre.tolist()))
        fitness.close()
    assert histories[0] == histories[1] == histories[2]


@pytest.mark.parametrize("name", ["Hopper", "Humanoid"])
def test_a_model_that_is_changed_counts_from_the_next_episode_on(name: str) -> None:
    """With contact forces and without: they are stepped in two ways."""
    changed, fresh = make_task(name), make_task(name)
    worlds = MujocoWorlds(changed)
    worlds.reset([0])
    changed.model.opt.gravity[2] = fresh.model.opt.gravity[2] = -1.0
    other, actions = MujocoWorlds(fresh), np.zeros((1, fresh.action_size))
    seen = []
    for each in (worlds, other, MujocoWorlds(make_task(name))):
        each.reset([0])
        seen.append(each.step(np.arange(1), actions)[0])
    np.testing.assert_array_equal(seen[0], seen[1])
    assert (seen[0] != seen[2]).any()


def test_equal_members_have_equal_returns() -> None:
    fitness = MujocoReturn("HalfCheetah", max_steps=100)
    trainer = make_trainer(fitness, Policy(17, 6), sigma=1e-30)
    scores = trainer.evaluate(trainer.ask())
    assert len(set(scores.tolist())) == 1
    fitness.close()


class Ball(MujocoTask):
    """A ball on a rail, to be pushed to the right."""

    xml = """<mujoco><worldbody><body><joint name="rail" type="slide" axis="1 0 0"/>
        <geom size="0.1"/></body></worldbody>
        <actuator><motor joint="rail" ctrlrange="-1 1" ctrllimited="true"/></actuator></mujoco>"""
    frame_skip = 10
    max_steps = 20

    def observe(self, state: State) -> Any:
        return np.hstack([state.qpos, state.qvel])

    def reward(self, before: State, action: Any, after: State) -> Any:
        return after.qpos[:, 0] - before.qpos[:, 0]


def test_a_task_of_ones_own_is_learnt() -> None:
    fitness = MujocoReturn(Ball())
    policy = Policy(2, 1, hidden=())
    before = fitness.evaluate(policy).returns.mean()
    make_trainer(fitness, policy, learning_rate=0.5, sigma=0.5).train(10, verbose=False)
    after = fitness.evaluate(policy)
    assert (after.lengths == 20).all()
    best = 0.5 * (1 / Ball().model.body_mass[1]) * (20 * Ball().dt) ** 2  # full force, all along
    assert before < 0.2 * best < 0.8 * best < after.returns.mean()
    fitness.close()


def test_a_simulation_that_explodes_counts_as_the_worst() -> None:
    class Explosive(Ball):
        xml = Ball.xml.replace('ctrlrange="-1 1"', 'ctrlrange="0 1" gear="1e12"')

    fitness = MujocoReturn(Explosive())
    trainer = make_trainer(
        fitness, Policy(2, 1, hidden=())
    )  # about half of the actions are positive
    with pytest.warns(EggrollWarning, match="Explosive became unstable"):
        metrics = trainer.step()
    assert 0.2 < metrics["nonfinite"] < 0.8
    assert trainer.generation == 1
    fitness.close()


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(ConfigurationError, match="there is no task 'Cheetah'; there are HalfChe"):
        MujocoReturn("Cheetah")
    with pytest.raises(ConfigurationError, match="expected a MujocoTask"):
        MujocoReturn(Ball)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="threads=0"):
        MujocoReturn(Ball(), threads=0)

    class Broken(Ball):
        xml = "<mujoco><nothing/></mujoco>"

    with pytest.raises(ConfigurationError, match="cannot be read"):
        Broken()
    fitness = MujocoReturn(Ball())
    with pytest.raises(ConfigurationError, match=r"returns \(3,\).*1 actuators"):
        make_trainer(fitness, nn.Linear(2, 3)).step()


@pytest.mark.slow
def test_an_inverted_pendulum_is_learnt() -> None:
    fitness = MujocoReturn("InvertedPendulum")
    policy = Policy(4, 1, hidden=())
    untrained = fitness.evaluate(policy).returns.mean()
    trainer = make_trainer(fitness, policy, population_size=32, learning_rate=0.3, sigma=0.5)
    trainer.train(15, verbose=False)
    assert untrained < 100
    assert fitness.evaluate(policy).returns.mean() > 900
    fitness.close()
