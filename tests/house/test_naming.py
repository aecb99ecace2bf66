"""Rules of names, on small repositories that break them."""

from collections.abc import Callable

from tests.house import naming
from tests.house.source import House

Build = Callable[[dict[str, str]], House]
TEST = '"""Sums."""\n'


def test_class_name_twice_is_found_in_the_product(build: Build) -> None:
    house = build(
        {"reward/a.py": "class A: ...\n", "trainer/b.py": "class A: ...\n", "tests/c.py": "class A: ...\n"}
    )
    found = sorted(str(violation) for violation in naming.duplicate_class(house, {}))
    assert found == [
        "reward/a.py:1 duplicate-class: A is also in trainer/b.py",
        "trainer/b.py:1 duplicate-class: A is also in reward/a.py",
    ]
    assert list(naming.duplicate_class(house, {"A": "a reason"})) == []


def test_class_exception_must_be_needed(build: Build) -> None:
    (violation,) = naming.duplicate_class(build({"reward/a.py": "class A: ...\n"}), {"A": "a reason"})
    assert violation.message == "the exception A is not needed"


def test_test_name_has_subject_and_property(build: Build) -> None:
    names = ["test_sum", "test_sum_small", "test_sum_is_small", "test_what_adds_is_a_sum", "helper"]
    house = build({"tests/test_a.py": "".join(f"def {name}(): ...\n" for name in names)})
    assert [violation.line for violation in naming.name_of_test(house)] == [1, 2, 4]


def test_test_file_has_a_docstring(build: Build) -> None:
    house = build({"tests/test_a.py": "x = 1\n", "tests/test_b.py": TEST, "tests/helper.py": "x = 1\n"})
    assert [violation.path for violation in naming.docstring_of_test(house)] == ["tests/test_a.py"]


def test_test_file_lies_where_its_module_does(build: Build) -> None:
    house = build(
        {
            "reward/sum/__init__.py": "",
            "reward/sum/total.py": "",
            "tests/reward/test_sum.py": TEST,
            "tests/reward/sum/test_sum.py": TEST,
            "tests/reward/sum/test_total.py": TEST,
            "tests/reward/sum/total/test_overflow.py": TEST,
            "tests/reward/sum/oracle.py": "",
            "tests/reward/sum/test_oracle.py": TEST,
            "tests/reward/test_total.py": TEST,
            "tests/whole/test_anything.py": TEST,
        }
    )
    found = [violation.path for violation in naming.place_of_test(house, {}, {"tests/whole": "whole runs"})]
    assert found == ["tests/reward/test_total.py"]
    listed = {"tests/reward/test_total.py": "a scenario"}
    assert list(naming.place_of_test(house, listed, {"tests/whole": "whole runs"})) == []


def test_scenario_must_be_there(build: Build) -> None:
    house = build({"reward/a.py": "", "tests/reward/test_a.py": TEST})
    found = [
        violation.message
        for violation in naming.place_of_test(
            house, {"tests/reward/test_a.py": "a scenario"}, {"tests/b": "runs"}
        )
    ]
    assert found == [
        "the scenario tests/reward/test_a.py is not there or not needed",
        "the folder of scenarios tests/b has no tests",
    ]
