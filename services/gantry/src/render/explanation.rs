//! Explanation of a placement as text: the workers that accept or refuse a workload, and the events
//! that would place it.

use rpc::pb::scheduler::{ExplainResponse, Verdict, WorkerExplanation};

use crate::render::labels;
use crate::render::table::{duration, filled, plain, render};

/// Maximum width of a cell, in characters. Messages of Gantry are shorter.
const WIDTH: usize = 1000;

/// Describes in one line why a workload waits.
pub(crate) fn short(response: &ExplainResponse) -> String {
    let why = plain(&response.summary, WIDTH);
    let wait = match labels::expected_wait(response) {
        Some(wait) => format!("; about {}", duration(wait)),
        None => String::new(),
    };
    format!("waiting, {} in the queue: {why}{wait}", ordinal(response.queue_position))
}

fn ordinal(number: u64) -> String {
    let ending = match (number % 100, number % 10) {
        (11..=13, _) => "th",
        (_, 1) => "st",
        (_, 2) => "nd",
        (_, 3) => "rd",
        _ => "th",
    };
    format!("{number}{ending}")
}

/// Formats an explanation. `waits`: whether the workload is already submitted.
pub(crate) fn text(response: &ExplainResponse, waits: bool) -> String {
    let ExplainResponse { queue_position, workers, unblocked_by, summary, groups, .. } = response;
    let best = workers.first().map_or("", |worker| worker.worker_name.as_str());
    let summary = plain(summary, WIDTH);
    let mut text = match response.verdict() {
        Verdict::Placed if best.is_empty() => "the workload can be placed now\n".to_owned(),
        Verdict::Placed => format!("the workload can be placed now, on {}\n", plain(best, WIDTH)),
        Verdict::NotNow if summary.is_empty() => {
            format!("the workload waits at position {queue_position} of the queue\n")
        }
        Verdict::NotNow => {
            format!("the workload waits at position {queue_position} of the queue: {summary}\n")
        }
        Verdict::Never if waits => {
            "no known worker can ever run the workload; it waits for a suitable worker to register\n"
                .to_owned()
        }
        Verdict::Never => {
            "no known worker can ever run the workload; submitting it now would fail\n".to_owned()
        }
        Verdict::Unspecified => {
            "the scheduler gave a verdict that this version of gantry does not know\n".to_owned()
        }
    };
    if response.verdict() == Verdict::NotNow {
        let basis = plain(&response.expected_wait_basis, WIDTH);
        match labels::expected_wait(response) {
            Some(wait) => text.push_str(&format!("expected wait: about {}; {basis}\n", duration(wait))),
            None if !basis.is_empty() => text.push_str(&format!("expected wait: {basis}\n")),
            None => {}
        }
    }
    if !workers.is_empty() {
        text.push('\n');
        text.push_str(&render(&["WORKER", "ANSWER"], &workers.iter().map(row).collect::<Vec<_>>()));
    }
    // The remaining workers are grouped.
    let (known, gone) = (response.workers_known, response.workers_gone);
    if known + gone > workers.len() as u64 {
        let willing = response.workers_eligible;
        let would = (willing > 0).then(|| vec![willing.to_string(), "can run it".to_owned(), String::new()]);
        let refuse = groups.iter().map(|group| {
            let says: Vec<_> = group.refusals.iter().map(|refusal| refusal.message.as_str()).collect();
            let more = if group.count > group.names.len() as u64 { ", …" } else { "" };
            let such_as = plain(&group.names.join(", "), WIDTH);
            vec![group.count.to_string(), plain(&says.join(", "), WIDTH), format!("{such_as}{more}")]
        });
        let rows: Vec<_> = would.into_iter().chain(refuse).collect();
        let all = match (known, gone) {
            (_, 0) => format!("all {known} workers"),
            (0, _) => format!("{gone} recently removed workers"),
            _ => format!("all {known} workers and {gone} recently removed ones"),
        };
        text.push_str(&format!("\nSummary of {all}\n"));
        text.push_str(&filled(&["COUNT", "ANSWER", "EXAMPLES"], &rows));
    }
    if !unblocked_by.is_empty() {
        text.push_str("\nThe workload is placed as soon as one of these happens:\n");
        for line in unblocked_by {
            text.push_str(&format!("  {}\n", plain(line, WIDTH)));
        }
    }
    text
}

fn row(worker: &WorkerExplanation) -> Vec<String> {
    let refusals: Vec<_> = worker.refusals.iter().map(|refusal| refusal.message.as_str()).collect();
    let says =
        if refusals.is_empty() { format!("can run it: {}", worker.standing) } else { refusals.join(", ") };
    vec![worker.worker_name.clone(), plain(&says, WIDTH)]
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rpc::pb::scheduler::{PlacementRefusal, RefusingWorkers};

    use super::*;

    #[test]
    fn text_has_refusals_and_remedies() {
        let refusal = |message: &str| PlacementRefusal { message: message.to_owned(), ..Default::default() };
        let response = ExplainResponse {
            verdict: Verdict::NotNow.into(),
            queue_position: 3,
            workers: vec![WorkerExplanation {
                worker_name: "one".to_owned(),
                refusals: vec![refusal("is cordoned"), refusal("is full (2 of 2 tasks)")],
                ..Default::default()
            }],
            unblocked_by: vec!["one: it is told to run again, and one of its tasks ends".to_owned()],
            workers_known: 1,
            ..Default::default()
        };
        let expected = "the workload waits at position 3 of the queue\n\nWORKER  ANSWER\none     is cordoned, is full (2 of 2 tasks)\n\n\
            The workload is placed as soon as one of these happens:\n  one: it is told to run again, and one of its tasks ends\n";
        assert_eq!(text(&response, false), expected);
    }

    #[test]
    fn many_workers_are_summarized() {
        let refusal = PlacementRefusal { message: "are full".to_owned(), ..Default::default() };
        let names = vec!["a".to_owned(), "b".to_owned()];
        let group = RefusingWorkers { refusals: vec![refusal], count: 12, names };
        let mut response = ExplainResponse {
            verdict: Verdict::NotNow.into(),
            queue_position: 3,
            summary: "all 12 workers that could take it are full".to_owned(),
            expected_wait: Some(rpc::duration(Duration::from_millis(40_400))),
            expected_wait_basis: "a slot was held for 40 s".to_owned(),
            workers_known: 12,
            groups: vec![group],
            ..Default::default()
        };
        let expected = "the workload waits at position 3 of the queue: all 12 workers that could take it are full\n\
            expected wait: about 40 s; a slot was held for 40 s\n\nSummary of all 12 workers\n\
            COUNT  ANSWER    EXAMPLES\n12     are full  a, b, …\n";
        assert_eq!(text(&response, false), expected);
        let line = "waiting, 3rd in the queue: all 12 workers that could take it are full";
        assert_eq!(short(&response), format!("{line}; about 40 s"));
        response.workers_gone = 3;
        let gone = text(&response, false);
        assert!(gone.contains("\nSummary of all 12 workers and 3 recently removed ones\n"), "{gone}");
        response.expected_wait = None;
        response.expected_wait_basis = "unknown: none came free".to_owned();
        assert_eq!(short(&response), line);
        assert!(text(&response, false).contains("\nexpected wait: unknown: none came free\n"));
        response.verdict = Verdict::Never.into();
        let never = [false, true].map(|waits| text(&response, waits));
        assert!(never[0].contains("submitting it now would fail\n"), "{}", never[0]);
        assert!(never[1].contains("it waits for a suitable worker to register\n"), "{}", never[1]);
        let ordinals = [1, 2, 11, 12, 13, 21, 102, 111, 1013].map(ordinal);
        assert_eq!(ordinals, ["1st", "2nd", "11th", "12th", "13th", "21st", "102nd", "111th", "1013th"]);
    }
}
