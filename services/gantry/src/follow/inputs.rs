//! Bars for the inputs that arrive on a worker.

use std::collections::BTreeMap;

use rpc::pb::scheduler::InputProgress;

use crate::render::progress::{Bar, Progress};
use crate::render::ui::Ui;

const COPYING: &str = "copying to the worker:";

/// One bar per input. They are removed when this is dropped.
pub(super) struct InputBars {
    progress: Progress,
    /// Bars, and whether their inputs are relayed.
    bars: BTreeMap<String, (Bar, bool)>,
}

impl InputBars {
    pub(super) fn start(ui: &Ui) -> Self {
        Self { progress: ui.progress(), bars: BTreeMap::new() }
    }

    /// Shows the inputs that are not on the worker yet.
    pub(super) fn show(&mut self, inputs: &[InputProgress]) {
        self.bars.retain(|name, _| inputs.iter().any(|input| input.name == *name));
        for InputProgress { name, bytes_done, bytes_total, relayed, .. } in inputs {
            let start = || self.progress.bar(COPYING, name);
            let (bar, was_relayed) = self.bars.entry(name.clone()).or_insert_with(|| (start(), false));
            if std::mem::replace(was_relayed, *relayed) != *relayed {
                bar.doing(if *relayed { "copying through the streamer:" } else { COPYING });
            }
            bar.expect(*bytes_total);
            bar.reach(*bytes_done);
        }
    }
}
