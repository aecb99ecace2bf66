"""Defines the keys of a run on the server.

Every key contains the hash tag `{tether:RUN}`, so that one cluster slot holds the run. Group ids are
zero-padded to 12 digits wherever they are members or fields, so that string order is numeric order. Times are
in ms of the run's clock, see `lua/_shared.lua`.

- `run` (hash): the run and its state: spec, bounds, version, epoch, counters, clock
- `lineage` (set): epochs of the current branch; engines that serve one of them get leases
- `epochs` (set): every epoch that ever claimed the run, so that none is used twice
- `groups` (hash): group -> JSON record; TRAINED and DROPPED groups until a checkpoint covers them
- `waiting` (zset): WAITING groups; all scores 0, hence ordered by id
- `leases` (zset): live leases by expiry
- `live` (zset): live leases by deadline (version); they hold a place in rule F
- `expired` (zset): LEASED groups with an expired lease; all scores 0; they hold no place in rule F
- `scored` (zset): SCORED groups by deadline; they hold a place in rule F
- `fresh` (zset): SCORED groups by the last step for which one of their tokens is within the bound
- `taken` (zset): groups of the running step by deadline
- `trained` (zset): TRAINED groups that no checkpoint covers, by step
- `dropped` (set): DROPPED groups that no checkpoint has swept
- `reasons` (hash): drop reason -> number of groups
- `wasted` (hash): drop reason -> number of sampled tokens
- `outcomes` (list): drop reason (empty: trained) of the last `drop_window` finished groups, newest first
- `batch` (string): JSON of the running step's batch, returned by a repeated take
- `gone` (list): groups that takes have dropped and no batch has reported yet
- `steps` (hash): step -> JSON record of a committed step that no checkpoint covers
- `reports` (hash): step -> encoded StepReport of a committed step that no checkpoint covers
- `manifest` (string): newest published WeightManifest, encoded
- `engines` (hash): engine incarnation -> "epoch version", last acknowledged
- `peers` (zset): process incarnations by the time at which their registration expires
- `peer_info` (hash): incarnation -> JSON of role and info
- `endpoints` (hash): incarnation -> JSON {topic: endpoint}; the field with the empty name counts changes
- `requests` (hash): lease request -> JSON of its lease, while the group is LEASED by it
- `waits` (hash): engine -> "groups time" of its last lease request without room
- `refuted` (set): incarnations of engines that an audit refutes, until they are unregistered
- `events` (stream): the event log; id `SEQ-0`, one field `e` with the JSON of the event
"""

NAMES = (
    "run", "lineage", "epochs", "groups", "waiting", "leases", "live", "expired", "scored", "fresh", "taken",
    "trained", "dropped", "reasons", "outcomes", "batch", "gone", "steps", "reports", "manifest", "engines",
    "peers", "peer_info", "endpoints", "requests", "events", "wasted", "waits", "refuted",
)  # fmt: skip
"""Key names in the order of KEYS in every script."""


class Keys:
    """Key names of one run."""

    def __init__(self, run: str) -> None:
        self.prefix = f"{{tether:{run}}}:"
        self.all = tuple(self.prefix + name for name in NAMES)

    def of(self, name: str) -> str:
        """Return the key called `name` in the list above."""
        return self.all[NAMES.index(name)]
