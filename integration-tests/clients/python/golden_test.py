"""Checks that Python decodes the golden corpus as Rust does."""

import pathlib
import sys
import unittest

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE / "gen"))

from google.protobuf import json_format, symbol_database
from google.rpc import error_details_pb2, status_pb2  # noqa: F401: known by name below

import client  # noqa: F401: knows all messages


class Golden(unittest.TestCase):
    def test_each_message_is_what_its_json_says(self):
        messages = sorted((HERE / "../golden").glob("*.binpb"))
        self.assertGreater(len(messages), 25)
        for path in messages:
            with self.subTest(path.name):
                name = path.name.rsplit(".", 2)[0]
                message = symbol_database.Default().GetSymbol(name)
                decoded = message.FromString(path.read_bytes())
                expected = json_format.Parse(path.with_suffix(".json").read_text(), message())
                self.assertEqual(decoded, expected)
        print(f"golden: {len(messages)} messages")
