"""A policy for a gymnasium environment, in seconds.

python examples/rl/train_gymnasium.py --env CartPole-v1 --minutes 0.5
python examples/rl/train_gymnasium.py --env Pendulum-v1 --minutes 2
python examples/rl/train_gymnasium.py --env LunarLander-v3 --minutes 5 --workers 2
"""

from __future__ import annotations

import gymnasium
import numpy as np
from training import Clock, Settings, parser, save, seeded, train

from eggroll_trainer.integrations.gymnasium import EpisodeReturn
from eggroll_trainer.policies import Policy

SETTINGS = {
    "CartPole-v1": Settings(population_size=32, sigma=0.3, hidden=(16,)),
    # A generation sees many beginnings. Some runs still end up spinning; at half this σ, more.
    "Pendulum-v1": Settings(
        population_size=128, learning_rate=1.0, sigma=0.4, final=0.2, common_seeds=False
    ),
    "LunarLander-v3": Settings(population_size=64, sigma=0.1, hidden=(16,), episodes=4),
}


def make_policy(env_id: str, hidden: tuple[int, ...]) -> Policy:
    """For the environment's own spaces; bounded actions by tanh."""
    env = gymnasium.make(env_id)
    observations = gymnasium.spaces.flatdim(env.observation_space)
    space = env.action_space
    env.close()
    if isinstance(space, gymnasium.spaces.Discrete):
        return Policy(observations, int(space.n), hidden, discrete=True)
    return Policy(observations, space.shape[0], hidden, low=space.low, high=space.high)


def run(
    env_id: str, settings: Settings, seconds: float, seed: int, workers: int
) -> tuple[Policy, Clock, np.ndarray]:
    """Train a policy; returns it, the clock, and 20 returns of the policy."""
    policy = seeded(seed, lambda: make_policy(env_id, settings.hidden))
    fitness = EpisodeReturn(
        env_id, settings.episodes, common_seeds=settings.common_seeds, workers=workers
    )
    clock = train(policy, fitness, settings, seconds, seed)
    returns = fitness.evaluate(policy, 20).returns
    fitness.close()
    return policy, clock, returns


def main() -> None:
    options = parser(__doc__, minutes=0.5, out="gymnasium")
    options.add_argument("--env", default="CartPole-v1", help="an id of gymnasium")
    options.add_argument("--workers", type=int, default=0, help="processes; 0 uses this one")
    args = options.parse_args()
    settings = SETTINGS.get(args.env, Settings())
    policy, clock, returns = run(args.env, settings, 60 * args.minutes, args.seed, args.workers)
    save(args.out, policy, clock, returns, args.env, seed=args.seed, settings=str(settings))


if __name__ == "__main__":
    main()
