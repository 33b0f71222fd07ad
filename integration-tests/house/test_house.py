"""Tests of the checks."""

import pathlib
import tempfile
import unittest

import book
import house


class Layers(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.root = pathlib.Path(directory.name)
        self.write("services/one/Cargo.toml", "[dependencies]\nserde = '1'\nunused-name = '1'\n")
        self.write("services/one/src/lib.rs", "mod high;\nmod low;\n#[cfg(test)]\nmod tests;\npub use high::ObjectKind;\n")
        self.write("services/one/src/high.rs", "use crate::low;\nuse serde::Serialize;\n")
        self.write("services/one/src/low.rs", "// use crate::high;\n#[cfg(test)]\nmod tests {\n    use crate::high;\n}\n")
        self.write("services/one/src/tests.rs", "use crate::high;\n")

    def write(self, path, text):
        path = self.root / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def problems(self, layers):
        self.write("layers.txt", layers)
        return house.check_layers(self.root, house.read_layers(self.root / "layers.txt"))

    def test_order_that_holds_is_no_problem(self):
        self.assertEqual(self.problems("[one]\nhigh low\n"), [])

    def test_edge_against_order_is_named(self):
        for text in ("use crate::high;\n", "use crate::{low, high::ObjectKind};\n", "fn f() { crate::ObjectKind::new(); }\n"):
            self.write("services/one/src/low/inner.rs", text)
            found = self.problems("[one]\nhigh low\n")
            self.assertEqual(found, ["one: low may not use high, which stands above it (low/inner.rs)"], text)
            self.assertEqual(self.problems("[one]\nhigh low\nlow -> high\n"), [])

    def test_exception_that_is_not_needed_is_named(self):
        self.assertIn("not needed any more", self.problems("[one]\nhigh low\nlow -> high\n")[0])

    def test_module_without_place_is_named(self):
        self.assertEqual(self.problems("[one]\nhigh\n"), ["one: layers.txt has no place for the module low"])
        self.assertEqual(self.problems("[one]\nhigh low old\n"), ["one: layers.txt names old, which is no module"])

    def test_circle_in_folder_is_named(self):
        self.write("services/one/src/low/mod.rs", "mod a;\nmod b;\nmod c;\n")
        self.write("services/one/src/low/a.rs", "use super::b::B;\n")
        self.write("services/one/src/low/b.rs", "use crate::low::c;\n")
        self.write("services/one/src/low/c.rs", "// use super::a;\n")
        self.assertEqual(house.check_circles(self.root, {}), [])
        self.write("services/one/src/low/c.rs", "use super::{Other, a::A};\n")
        self.assertEqual(house.check_circles(self.root, {}), ["one low has a circle of a, b, c"])
        self.assertEqual(house.check_circles(self.root, {"circle": [("one low", 1)]}), [])

    def test_word_beyond_limit_is_named(self):
        self.write("README.md", "It is made anew. Anew!\n")
        limits = {"words": [(r"\banew\b", 1)]}
        self.assertEqual(house.check_words(self.root, limits), ["\\banew\\b: there are 2, and limits.txt allows 1"])
        self.write("README.md", "It is made anew.\n")
        self.assertEqual(house.check_words(self.root, limits), [])

    def test_wide_comment_beyond_limit_is_named(self):
        self.write("services/one/src/high.rs", "// " + "x" * 98 + "\n")
        self.assertEqual(len(house.check_width(self.root, {"width": [("comments", 0)]})), 1)
        self.assertEqual(house.check_width(self.root, {"width": [("comments", 1)]}), [])

    def test_unused_dependency_is_named(self):
        self.write("integration-tests/Cargo.toml", "")
        self.assertEqual(house.check_unused(self.root), ["services/one/Cargo.toml: unused-name is named by no file"])

    def test_link_to_nothing_is_named(self):
        self.write("README.md", "[there](docs/a.md), [not](docs/b.md), [far](https://example.com)\n")
        self.write("docs/a.md", "")
        self.assertEqual(house.check_links(self.root), ["README.md: docs/b.md leads nowhere"])

    def test_setting_without_a_row_is_named(self):
        arguments = """
    #[arg(long, env = "GANTRY_A_B", value_parser = parse(1))]
    a_b: u32,
    #[arg(long = "c", env = "GANTRY_C")]
    pub c_list: Vec<String>,
    /// No setting.
    #[arg(long)]
    print: bool,
"""
        self.write("services/one/src/main.rs", arguments)
        self.write("docs/operations/settings.md", "| `--a-b` | 1 | |\n| `--d` | `--e` | |\n")
        problems = ["settings.md does not list --c", "settings.md lists --d, which no service has"]
        self.assertEqual(house.check_settings(self.root), problems)

    def test_attack_without_a_test_is_named(self):
        self.write("shared/one/tests/a.rs", "fn a_b_c() {}\nfn d_e_f_g() {}\n")
        self.write("docs/security.md", "| x_y_z | stop | `a.rs`: `a_b_c`, `d_e_f…`, `a_b_d` |\n| - | `p_q_r` | none |\n")
        self.assertEqual(house.check_attacks(self.root), ["security.md names a_b_d, which is no test"])

    def test_link_to_missing_heading_is_named(self):
        self.write("README.md", "# A `b` c\n\n[here](#a-b-c), [there](docs/a.md#one-1), [not](docs/a.md#two)\n")
        self.write("docs/a.md", "# One\n\n## One\n\n```\n# two\n```\n")
        self.assertEqual(house.check_links(self.root), ["README.md: docs/a.md#two leads to no heading"])

    def test_link_out_of_the_book_becomes_a_name(self):
        text = "[a](../c/README.md#x), [`proto/a`](../../proto/a), [b](b.md), [far](https://example.com)"
        self.assertEqual(
            book.without_outside_links(text, "operations/a.md"),
            "[a](../c/index.md#x), `proto/a`, [b](b.md), [far](https://example.com)",
        )
        self.assertEqual(book.without_outside_links("[a](../proto/README.md)", "a.md"), "a (`proto/README.md`)")
        self.assertEqual(book.without_outside_links("[a](decisions/README.md)", "a.md"), "[a](decisions/index.md)")


if __name__ == "__main__":
    unittest.main()
