"""What tenants may still have: the one place where policies look before they give GPUs to a job.

A tenant's jobs with a claim never have more GPUs than its quota, whatever the policy. Jobs belong
to an account: the tenant whose quota they count against, or None where nobody's does: in a cluster
without quotas, and opportunistic jobs under a policy that knows them.
"""

from __future__ import annotations

from collections.abc import Mapping

from waterflow.cluster.spec import ClusterSpec, JobSpec

Account = str | None


def account_of(cluster: ClusterSpec, spec: JobSpec, opportunistic: bool) -> Account:
    """Whose quota a job counts against while it is, or is not, opportunistic."""
    return None if opportunistic or not cluster.quotas else spec.tenant


class Allowance:
    """What is left of the quotas while a policy decides; a tenant without a quota has none."""

    def __init__(self, quotas: Mapping[str, int], used: Mapping[str, int]) -> None:
        self._quotas = quotas
        self._used = dict(used)
        self._closed: set[Account] = set()

    def left(self, account: Account, most: int) -> int:
        """How many GPUs an account may still have, of `most` that are asked for."""
        if account is None:
            return most
        if account in self._closed:
            return 0
        return max(min(self._quotas.get(account, 0) - self._used.get(account, 0), most), 0)

    def fits(self, account: Account, gpus: int) -> bool:
        """An account may have so many more GPUs."""
        return account is None or self.left(account, gpus) >= gpus

    def take(self, account: Account, gpus: int) -> None:
        """They are given to one of its jobs."""
        if account is not None:
            self._used[account] = self._used.get(account, 0) + gpus

    def close(self, account: Account) -> None:
        """Nothing more: one of its jobs waits for quota, and nobody of its tenant is to pass it."""
        self._closed.add(account)
