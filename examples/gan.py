"""Two GANs of different learning rates on digits, side by side in one budget."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import waterflow as wf

batches = torch.tensor(load_digits().data[:1792] / 8 - 1, dtype=torch.float32).split(64)


def gan(rate, epochs=3):
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())
    critic = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    of_generator = torch.optim.Adam(generator.parameters(), lr=rate, betas=(0.5, 0.999))
    of_critic = torch.optim.Adam(critic.parameters(), lr=rate, betas=(0.5, 0.999))

    def step(real):
        fake = generator(torch.randn(len(real), 16))
        of_critic.zero_grad()
        critic_loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        critic_loss.backward()
        of_critic.step()
        of_generator.zero_grad()
        loss = F.softplus(-critic(fake)).mean()
        loss.backward()
        of_generator.step()
        return loss, {"critic": critic_loss}

    model, optimizers = {"generator": generator, "critic": critic}, [of_generator, of_critic]
    job = {"model": model, "optimizers": optimizers, "step": step, "data": list(batches)}
    return wf.Job(f"rate-{rate}", **job, epochs=epochs)


if __name__ == "__main__":
    for job in wf.run([gan(1e-3), gan(3e-4)], memory="8MiB"):
        print(f"{job.name}: loss {job.losses[-1]:.3f}, critic {job.metrics['critic'][-1]:.3f}")
