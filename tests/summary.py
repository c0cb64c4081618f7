#!/usr/bin/env python3
"""Print what JUnit files say: minutes a suite, the tests that failed, and `N passed, N failed` as the last line.

usage: summary.py [--also-failed TEXT]... FILE.xml...
Exit code 1 if a test failed, or none ran. --also-failed counts what left no file, a crash for instance.
"""
import argparse
import collections
import sys
import xml.etree.ElementTree as ElementTree


def suite_of(suite, case):
    """meson: suite "megashard.parallel.Group" -> parallel; pytest: class "interop.test_x" -> interop/test_x."""
    for word in case.get("classname", "").split("."):
        if word.startswith("test_"):
            return f"interop/{word}"
    words = suite.get("name", "").split(".")
    return words[1] if len(words) > 1 else words[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--also-failed", action="append", default=[])
    args = parser.parse_args()

    seconds = collections.Counter()
    counts = collections.defaultdict(collections.Counter)
    failed = list(args.also_failed)
    skipped = []
    for path in args.files:
        for suite in ElementTree.parse(path).getroot().iter("testsuite"):
            for case in suite.findall("testcase"):
                name = suite_of(suite, case)
                seconds[name] += float(case.get("time") or 0)
                full_name = f"{name}: {case.get('classname', '')}.{case.get('name')}"
                why = next((found for kind in ("failure", "error") if (found := case.find(kind)) is not None), None)
                if why is not None:
                    failed.append(f"{full_name}: {' '.join((why.get('message') or why.text or '').split())[:300]}")
                    counts[name]["failed"] += 1
                elif case.find("skipped") is not None or case.get("status") == "notrun":
                    skip = case.find("skipped")
                    skipped.append(f"{full_name}: {'' if skip is None else skip.get('message', '')}")
                    counts[name]["skipped"] += 1
                else:
                    counts[name]["passed"] += 1

    print("minutes  passed  failed  skipped  suite")
    for name in sorted(counts):
        of = counts[name]
        print(f"{seconds[name] / 60:7.2f}  {of['passed']:6}  {of['failed']:6}  {of['skipped']:7}  {name}")
    for line in skipped:
        print(f"skipped: {line.splitlines()[0]}")
    for line in failed:
        print(f"FAILED: {line}")
    passed = sum(of["passed"] for of in counts.values())
    print(f"{passed} passed, {len(failed)} failed" + (f", {len(skipped)} skipped" if skipped else ""))
    sys.exit(1 if failed or passed == 0 else 0)


main()
