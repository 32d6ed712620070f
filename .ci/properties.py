"""Properties of what is hashed, with hypothesis: for every value there is.

    VENV/bin/python .ci/properties.py

Equal values hash equal, however they are spelt; different ones differ; no
member of a definition can bleed into another; and the reader refuses what it
cannot give as it stands. The same examples at every run.
"""
import importlib.util
import json
import os
import re
import sys
import unittest
from decimal import Decimal

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def load_program():
    """Import preflight.py by its path."""
    spec = importlib.util.spec_from_file_location(
        'preflight', os.path.join(ROOT, 'preflight.py'))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pf = load_program()
settings.register_profile('ci', max_examples=400, derandomize=True,
                          database=None, deadline=None,
                          suppress_health_check=list(HealthCheck))
settings.load_profile('ci')

# Lone surrogates, quotes, controls and all else that a server may send.
TEXT = st.text(st.one_of(st.characters(exclude_categories=()),
                         st.sampled_from('"\\{}[],:nullv1\ud800\0')))
LEAF = st.one_of(
    st.none(), st.booleans(), st.integers(-10, 10), st.integers(), TEXT,
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0, -0.0, 1, 1.0, True, '1', 1e16, 10 ** 16, 1e22,
                     2 ** 53, 2.0 ** 53, 2 ** 53 + 1, '', 'true', 'null']))
VALUE = st.recursive(LEAF, lambda inner: st.one_of(
    st.lists(inner, max_size=4), st.dictionaries(TEXT, inner, max_size=4)),
    max_leaves=12)
MEMBER = st.one_of(VALUE, TEXT)
TOOL = st.fixed_dictionaries({'name': TEXT}, optional=dict.fromkeys(
    ('title', 'description', 'inputSchema', 'outputSchema'), MEMBER))


def is_same(one, two):
    """Tell whether two JSON values are equal: 1 is 1.0 and is not true."""
    numbers = (int, float)
    if type(one) in numbers and type(two) in numbers:
        return Decimal(one) == Decimal(two)
    if type(one) is not type(two):
        return False
    if isinstance(one, list):
        return len(one) == len(two) and all(map(is_same, one, two))
    if isinstance(one, dict):
        return set(one) == set(two) and all(is_same(one[key], two[key])
                                            for key in one)
    return one == two


def spell(value, draw):
    """Write a JSON value in one of the ways there are for it."""
    space = draw(st.sampled_from(['', ' ', '\n\t']))
    if isinstance(value, dict):
        keys = draw(st.permutations(sorted(value)))
        inside = [spell(key, draw) + space + ':' + spell(value[key], draw)
                  for key in keys]
        return '{%s%s}' % (space, (',' + space).join(inside))
    if isinstance(value, list):
        return '[%s]' % (space + ',').join(spell(item, draw)
                                           for item in value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=draw(st.booleans()))
    is_number = type(value) in (int, float)
    if is_number and value == int(value) and abs(value) < 10 ** 15:
        whole = int(value)
        return draw(st.sampled_from([
            '%d' % whole, '%d.0' % whole, '%d.000' % whole,
            '%de0' % whole, '%d.0e0' % whole]))
    return json.dumps(value)


def digest(value):
    """Hash a value as it is hashed when a server sends it."""
    return pf.sha256(pf.canonical(pf.decode_json(json.dumps(value))))


def digest_of(tool):
    """Hash a tool as it is hashed when a server lists it."""
    return pf.sha256(pf.definition_text(pf.decode_json(json.dumps(tool))))


def changed(value, draw):
    """Change one thing somewhere in a value, or all of it."""
    if isinstance(value, dict) and value and draw(st.booleans()):
        key = draw(st.sampled_from(sorted(value)))
        return dict(value, **{key: changed(value[key], draw)})
    if isinstance(value, list) and value and draw(st.booleans()):
        at = draw(st.integers(0, len(value) - 1))
        return value[:at] + [changed(value[at], draw)] + value[at + 1:]
    return draw(VALUE)


class Hashes(unittest.TestCase):
    """Of canonical JSON and of definitions (contract: hash version 1)."""

    @given(VALUE, st.data())
    def test_every_spelling_of_a_value_hashes_alike(self, value, data):
        text = spell(value, data.draw)
        self.assertEqual(pf.sha256(pf.canonical(pf.decode_json(text))),
                         digest(value))

    @given(VALUE, VALUE)
    def test_two_values_hash_alike_if_and_only_if_they_are_equal(self, one,
                                                                 two):
        self.assertEqual(digest(one) == digest(two), is_same(one, two))

    @given(VALUE, st.data())
    def test_any_change_of_a_value_shows(self, value, data):
        other = changed(value, data.draw)
        self.assertEqual(digest(value) == digest(other),
                         is_same(value, other))

    @given(VALUE)
    def test_the_canonical_form_is_ascii_and_its_own(self, value):
        text = pf.canonical(pf.decode_json(json.dumps(value)))
        text.encode('ascii')
        self.assertEqual(pf.canonical(pf.decode_json(text)), text)
        self.assertEqual(re.findall(r'\s', re.sub(r'"(\\.|[^"\\])*"', '',
                                                  text)), [])

    @given(TOOL, TOOL)
    def test_tools_hash_alike_if_and_only_if_their_members_do(self, one,
                                                              two):
        here, there = ({key: value for key, value in tool.items()
                        if value is not None} for tool in (one, two))
        self.assertEqual(digest_of(one) == digest_of(two),
                         is_same(here, there))

    @given(TOOL, st.data())
    def test_no_member_bleeds_into_another(self, tool, data):
        keys = sorted(tool)
        other = dict(zip(keys, data.draw(st.permutations(
            [tool[key] for key in keys]))))
        here, there = ({key: value for key, value in each.items()
                        if value is not None} for each in (tool, other))
        self.assertEqual(digest_of(tool) == digest_of(other),
                         is_same(here, there))

    @given(TEXT, TEXT, TEXT, TEXT)
    def test_where_one_text_ends_counts(self, one, two, three, four):
        pairs = (one, two), (three, four)
        tools = [{'name': 't', 'title': title, 'description': text}
                 for title, text in pairs]
        self.assertEqual(digest_of(tools[0]) == digest_of(tools[1]),
                         pairs[0] == pairs[1])

    @given(TOOL, st.sampled_from(['title', 'description', 'inputSchema',
                                  'outputSchema']))
    def test_a_null_member_is_an_absent_one(self, tool, key):
        absent = {name: value for name, value in tool.items()
                  if name != key}
        self.assertEqual(digest_of(dict(tool, **{key: None})),
                         digest_of(absent))

    @given(TOOL, VALUE, VALUE)
    def test_what_is_not_hashed_does_not_count(self, tool, one, two):
        self.assertEqual(digest_of(dict(tool, annotations=one, icons=two)),
                         digest_of(tool))

    @given(TOOL)
    def test_hashing_anew_gives_what_a_look_gives(self, tool):
        body = pf.decode_json(json.dumps(tool))
        text = pf.definition_text(body)
        older = text.replace('"v":%d}' % pf.HASH_VERSION, '"v":0}')
        self.assertEqual(pf.rehash(pf.sha256(older), older),
                         (pf.sha256(text), text))
        self.assertIsNone(pf.rehash(pf.sha256(text + ' '), text))


# Texts that are JSON, or nearly: numbers that no float holds, keys that
# stand twice, nesting without end.
NUMBER = st.one_of(
    st.from_regex(r'-?(0|[1-9][0-9]{0,20})(\.[0-9]{1,20})?'
                  r'([eE][+-]?[0-9]{1,4})?', fullmatch=True),
    st.sampled_from(['NaN', 'Infinity', '-Infinity', '1e400', '-1e400',
                     '9' * 4000, '9' * 4001, '01', '+1', '.5', '1.']))
PIECE = st.recursive(
    st.one_of(NUMBER, st.sampled_from(['true', 'null', '"a"', '"[{"', "'"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(lambda items: '[%s]'
                                        % ','.join(items)),
        st.lists(st.tuples(st.sampled_from(['"a"', '"b"', '"\\u0061"', 'a']),
                           inner), max_size=3).map(
            lambda pairs: '{%s}' % ','.join(map(':'.join, pairs)))),
    max_leaves=8)


def read_plainly(text):
    """Read JSON by nothing but the library; keys that repeat are kept."""
    return json.loads(text, object_pairs_hook=tuple, parse_float=Decimal)


def is_read_right(plain, ours):
    """Tell whether a value is what the plain reading of it says."""
    if isinstance(plain, Decimal):      # what a float cannot hold is lost
        kind = int if float(plain).is_integer() else float
        return type(ours) is kind and ours == float(plain)
    if isinstance(plain, tuple):
        return isinstance(ours, dict) and len(plain) == len(ours) and all(
            is_read_right(item, ours[key]) for key, item in plain)
    if isinstance(plain, list):
        return isinstance(ours, list) and len(plain) == len(ours) and all(
            map(is_read_right, plain, ours))
    return plain == ours and type(plain) is type(ours)


class Reader(unittest.TestCase):
    """It gives a value as it stands, or says that it does not."""

    @given(PIECE)
    def test_it_refuses_rather_than_alters(self, text):
        try:
            plain = read_plainly(text)
        except ValueError:
            with self.assertRaises(ValueError):
                pf.decode_json(text)
            return
        ours = pf.decode_json(text)
        if not pf.find_refused(ours):
            self.assertTrue(is_read_right(plain, ours), (plain, ours))

    @given(st.integers(0, 30), st.integers(0, 20), TEXT)
    def test_depth_is_counted_outside_of_texts(self, depth, limit, inside):
        text = '[' * depth + json.dumps(inside) + ']' * depth
        self.assertEqual(bool(pf.find_refused(pf.decode_json(text, limit))),
                         depth > limit)

    @given(st.binary(max_size=60))
    def test_bytes_are_a_snapshot_or_a_sentence(self, data):
        with self.assertRaises(pf.UsageError):
            pf.read_snapshot('F', data)

    @given(st.dictionaries(st.sampled_from(sorted(pf.SNAPSHOT)), VALUE))
    def test_json_is_a_snapshot_or_a_sentence(self, table):
        table.update(snapshot_version=pf.SNAPSHOT_VERSION,
                     hash_version=pf.HASH_VERSION)
        table = pf.decode_json(json.dumps(table))
        table['sha256'] = pf.snapshot_digest(table)
        try:
            pf.read_snapshot('F', json.dumps(table).encode())
        except pf.UsageError:
            return
        self.assertEqual(set(table), set(pf.SNAPSHOT))


if __name__ == '__main__':
    sys.set_int_max_str_digits(0)
    unittest.main()
