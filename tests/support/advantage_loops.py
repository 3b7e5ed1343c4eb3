"""Advantages as Python loops over lists, which are the definitions, one number at a time; and random inputs."""

from __future__ import annotations

import math

import torch

NAN = math.nan


def random_rewards(seed, rows, columns=None, nan_share=0.2, dtype=torch.float32):
    """Rewards of a few levels, as verifiers give them, some unscored."""
    gen = torch.Generator().manual_seed(seed)
    shape = (rows,) if columns is None else (rows, columns)
    rewards = torch.randint(-2, 4, shape, generator=gen).to(dtype) * 0.37
    return rewards.masked_fill(torch.rand(shape, generator=gen) < nan_share, NAN)


def random_tokens(seed, rows=5, length=11):
    """Values and a mask with holes; the first row counts nothing, the second everything."""
    gen = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, length, generator=gen) < 0.6
    mask[0], mask[1] = False, True
    return torch.randn(rows, length, generator=gen, dtype=torch.float64), mask


def mean_std(values, correction):
    """Over the non-NaN values; the std of one value is NaN with a correction of 1."""
    scored = [v for v in values if not math.isnan(v)]
    if not scored:
        return NAN, NAN
    mean = math.fsum(scored) / len(scored)
    if len(scored) == correction:
        return mean, NAN
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in scored) / (len(scored) - correction))


def weighted(row, weights):
    scored = [w * r for w, r in zip(weights, row, strict=True) if not math.isnan(r)]
    return math.fsum(scored) if scored else NAN


def z_scores(values, ids, correction, epsilon, over="group"):
    out = []
    for value, own in zip(values, ids, strict=True):
        mean, spread = mean_std(
            [v for v, i in zip(values, ids, strict=True) if i == own], correction
        )
        if over == "batch":
            spread = mean_std(values, correction)[1]
        if over == "mean":
            spread = mean
        no_signal = over == "mean" and not mean > 0
        out.append(
            0.0
            if no_signal
            else value - mean
            if over == "none"
            else (value - mean) / (spread + epsilon)
        )
    return out


def loop_group(table, ids, weights, scale, std, aggregation, epsilon):
    correction = 1 if std == "sample" else 0
    if aggregation == "sum_then_normalize":
        result = z_scores(
            [weighted(row, weights) for row in table], ids, correction, epsilon, scale
        )
    else:
        columns = [
            z_scores(list(column), ids, correction, epsilon) for column in zip(*table, strict=True)
        ]
        rows = list(zip(*columns, strict=True))
        totals = []
        for row, given in zip(rows, table, strict=True):
            unscored = all(math.isnan(r) for r in given)
            totals.append(
                NAN
                if unscored
                else math.fsum(w * z for w, z in zip(weights, row, strict=True) if z == z)
            )
        mean, spread = mean_std(totals, correction)
        result = [(t - mean) / (spread + epsilon) for t in totals]
    return [0.0 if math.isnan(a) else a for a in result]


def loop_rloo(values, ids, normalize, epsilon):
    out = []
    for i, value in enumerate(values):
        others = [
            v for j, v in enumerate(values) if ids[j] == ids[i] and j != i and not math.isnan(v)
        ]
        out.append(value - math.fsum(others) / len(others) if others else NAN)
    if normalize:
        mean, spread = mean_std(out, 1)
        out = [(a - mean) / (spread + epsilon) for a in out]
    return [0.0 if math.isnan(a) else a for a in out]


def loop_process(rewards, ends, ids, mask, correction, epsilon):
    out = [[0.0] * len(row) for row in mask]
    for b, own in enumerate(ids):
        pool = [r for row, i in zip(rewards, ids, strict=True) if i == own for r in row]
        mean, spread = mean_std(pool, correction)
        for t in range(len(mask[b])):
            steps = [
                (r - mean) / (spread + epsilon)
                for r, e in zip(rewards[b], ends[b], strict=True)
                if e >= t
            ]
            out[b][t] = math.fsum(s for s in steps if not math.isnan(s)) if mask[b][t] else 0.0
    return out


def loop_gae(rewards, values, mask, gamma, lam, last):
    advantages = [[0.0] * len(row) for row in mask]
    returns = [[0.0] * len(row) for row in mask]
    for b, row in enumerate(mask):
        following, running = last[b], 0.0
        for t in reversed([t for t, counts in enumerate(row) if counts]):
            running = rewards[b][t] + gamma * following - values[b][t] + gamma * lam * running
            following = values[b][t]
            advantages[b][t], returns[b][t] = running, running + following
    return advantages, returns


def loop_reinforce(totals, mask, kl, beta, gamma):
    """Returns before whitening; None where a position is left out."""
    out = [[None] * len(row) for row in mask]
    for b, row in enumerate(mask):
        running, reward = 0.0, totals[b]
        if math.isnan(reward):
            continue
        for t in reversed([t for t, counts in enumerate(row) if counts]):
            running = reward - beta * kl[b][t] + gamma * running
            out[b][t], reward = running, 0.0
    return out
