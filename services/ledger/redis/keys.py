"""Names the keys of a run on the server.

Every key carries the hash tag `{tether:RUN}`, so that one cluster slot holds the run.

| key | type | holds | |---|---|---| | `run` | hash | the run and its state: spec, bounds, version, epoch,
counters, clock | | `lineage` | set | epochs whose branch is the current one; engines that serve one of them
get leases | | `epochs` | set | every epoch that ever claimed the run, so that none is used twice | | `groups`
| hash | padded group id -> JSON record; TRAINED and DROPPED ones until a checkpoint covers them | | `waiting`
| zset | WAITING groups; all scores 0, so in order of id | | `leases` | zset | live leases by expiry (ms of
the run's clock, see `lua/_shared.lua`) | | `live` | zset | the same leases by deadline (version): they hold a
place in rule F | | `expired` | zset | LEASED groups whose lease has run out; all scores 0; they hold no place
in rule F | | `scored` | zset | SCORED groups by deadline: they hold a place in rule F | | `fresh` | zset |
SCORED groups by the last step for which one of their tokens is within the bound | | `taken` | zset | groups
of the running step by deadline | | `trained` | zset | TRAINED groups that no checkpoint covers, by step | |
`dropped` | set | DROPPED groups that no checkpoint has swept | | `reasons` | hash | drop reason -> groups | |
`wasted` | hash | drop reason -> sampled tokens of its groups | | `outcomes` | list | drop reason (empty:
trained) of the last `drop_window` finished groups, newest first | | `batch` | string | JSON of the running
step's batch, which a repeated take returns | | `gone` | list | groups that takes have dropped and no batch
has reported yet | | `steps` | hash | step -> JSON record of a committed step that no checkpoint covers | |
`reports` | hash | step -> encoded StepReport of a committed step that no checkpoint covers | | `manifest` |
string | newest published WeightManifest, encoded | | `engines` | hash | engine incarnation -> "epoch version"
last acknowledged | | `peers` | zset | process incarnations by the time at which they are taken for dead (ms
of the run's clock) | | `peer_info` | hash | incarnation -> JSON of role and info | | `endpoints` | hash |
incarnation -> JSON {topic: endpoint}; the field with the empty name counts changes | | `requests` | hash |
lease request -> JSON of the lease granted for it, while the group is LEASED by it | | `waits` | hash | engine
-> "groups time" of its last lease request, if that found no room: the groups that it had, and when (ms of the
run's clock) | | `refuted` | set | incarnations of engines that an audit refutes, until they are
unregistered | | `events` | stream | the event log; id `SEQ-0`, one field `e` with the JSON of the event |

Group ids are zero-padded to 12 digits wherever they are members or fields, so that the order of strings is
the order of ids.
"""

NAMES = (
    "run", "lineage", "epochs", "groups", "waiting", "leases", "live", "expired", "scored", "fresh", "taken",
    "trained", "dropped", "reasons", "outcomes", "batch", "gone", "steps", "reports", "manifest", "engines",
    "peers", "peer_info", "endpoints", "requests", "events", "wasted", "waits", "refuted",
)  # fmt: skip
"""Keys in the order in which every script gets them as KEYS."""


class Keys:
    """Key names of one run."""

    def __init__(self, run: str) -> None:
        self.prefix = f"{{tether:{run}}}:"
        self.all = tuple(self.prefix + name for name in NAMES)

    def of(self, name: str) -> str:
        """Return the key called `name` in the table above."""
        return self.all[NAMES.index(name)]
