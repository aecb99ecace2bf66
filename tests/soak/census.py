"""How many things live in this process: what grows here without end is a leak, however little memory it takes yet."""

import gc
import os
from collections import OrderedDict, deque

CONTAINERS = (dict, list, set, deque, OrderedDict)


def census() -> dict[str, int]:
    """Objects that the garbage collector knows, entries in all containers together, and open descriptors."""
    gc.collect()
    objects = gc.get_objects()
    entries = sum(len(thing) for thing in objects if type(thing) in CONTAINERS and thing is not objects)
    return {"objects": len(objects), "entries": entries, "descriptors": len(os.listdir("/proc/self/fd"))}
