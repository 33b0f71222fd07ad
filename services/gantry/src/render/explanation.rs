//! The scheduler's explanation of a placement as text: who would take a workload, who refuses, and what would help.

use rpc::pb::scheduler::{ExplainResponse, Verdict, WorkerExplanation};

use crate::render::labels;
use crate::render::table::{duration, filled, plain, render};

/// How wide a cell is at most: what no sentence of ours comes to.
const WIDTH: usize = 1000;

/// Why it waits, in one line.
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

/// `waits`: whether it was submitted.
pub(crate) fn text(response: &ExplainResponse, waits: bool) -> String {
    let ExplainResponse { queue_position, workers, unblocked_by, summary, groups, .. } = response;
    let best = workers.first().map_or("", |worker| worker.worker_name.as_str());
    let summary = plain(summary, WIDTH);
    let mut text = match response.verdict() {
        Verdict::Placed if best.is_empty() => "it is placed at once\n".to_owned(),
        Verdict::Placed => format!("it is placed at once, on {}\n", plain(best, WIDTH)),
        Verdict::NotNow if summary.is_empty() => {
            format!("it waits, as number {queue_position} by priority and age\n")
        }
        Verdict::NotNow => format!("it waits, as number {queue_position} by priority and age: {summary}\n"),
        Verdict::Never if waits => {
            "no worker that is known could ever run it: it waits for one that registers and can\n".to_owned()
        }
        Verdict::Never => {
            "no worker that is known could ever run it: it is refused if it is submitted now\n".to_owned()
        }
        Verdict::Unspecified => "the scheduler gives no verdict that is known here\n".to_owned(),
    };
    if response.verdict() == Verdict::NotNow {
        let basis = plain(&response.expected_wait_basis, WIDTH);
        match labels::expected_wait(response) {
            Some(wait) => text.push_str(&format!("it may take about {}: {basis}\n", duration(wait))),
            None if !basis.is_empty() => text.push_str(&format!("how long that may take is {basis}\n")),
            None => {}
        }
    }
    if !workers.is_empty() {
        text.push('\n');
        text.push_str(&render(&["WORKER", "SAYS"], &workers.iter().map(row).collect::<Vec<_>>()));
    }
    // All others.
    let (known, gone) = (response.workers_known, response.workers_gone);
    if known + gone > workers.len() as u64 {
        let willing = response.workers_willing;
        let would = (willing > 0).then(|| vec![willing.to_string(), "would do".to_owned(), String::new()]);
        let refuse = groups.iter().map(|group| {
            let says: Vec<_> = group.refusals.iter().map(|refusal| refusal.message.as_str()).collect();
            let more = if group.count > group.names.len() as u64 { ", …" } else { "" };
            let such_as = plain(&group.names.join(", "), WIDTH);
            vec![group.count.to_string(), plain(&says.join(", "), WIDTH), format!("{such_as}{more}")]
        });
        let rows: Vec<_> = would.into_iter().chain(refuse).collect();
        let all = match (known, gone) {
            (_, 0) => format!("all {known} workers"),
            (0, _) => format!("{gone} that went away minutes ago"),
            _ => format!("all {known} workers, and {gone} that went away minutes ago"),
        };
        text.push_str(&format!("\nOf {all}\n"));
        text.push_str(&filled(&["COUNT", "SAY", "SUCH AS"], &rows));
    }
    if !unblocked_by.is_empty() {
        text.push_str("\nIt is placed as soon as\n");
        for line in unblocked_by {
            text.push_str(&format!("  {}\n", plain(line, WIDTH)));
        }
    }
    text
}

fn row(worker: &WorkerExplanation) -> Vec<String> {
    let refusals: Vec<_> = worker.refusals.iter().map(|refusal| refusal.message.as_str()).collect();
    let says =
        if refusals.is_empty() { format!("would do: {}", worker.standing) } else { refusals.join(", ") };
    vec![worker.worker_name.clone(), plain(&says, WIDTH)]
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rpc::pb::scheduler::{PlacementRefusal, RefusingWorkers};

    use super::*;

    #[test]
    fn each_worker_says_why_not_and_what_would_help() {
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
        let expected = "it waits, as number 3 by priority and age\n\nWORKER  SAYS\none     is cordoned, is full (2 of 2 tasks)\n\n\
            It is placed as soon as\n  one: it is told to run again, and one of its tasks ends\n";
        assert_eq!(text(&response, false), expected);
    }

    #[test]
    fn many_workers_are_told_together_and_the_wait_in_one_line() {
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
        let expected = "it waits, as number 3 by priority and age: all 12 workers that could take it are full\n\
            it may take about 40 s: a slot was held for 40 s\n\nOf all 12 workers\n\
            COUNT  SAY       SUCH AS\n12     are full  a, b, …\n";
        assert_eq!(text(&response, false), expected);
        let line = "waiting, 3rd in the queue: all 12 workers that could take it are full";
        assert_eq!(short(&response), format!("{line}; about 40 s"));
        response.workers_gone = 3;
        let told = text(&response, false);
        assert!(told.contains("\nOf all 12 workers, and 3 that went away minutes ago\n"), "{told}");
        response.expected_wait = None;
        response.expected_wait_basis = "unknown: none came free".to_owned();
        assert_eq!(short(&response), line);
        assert!(text(&response, false).contains("\nhow long that may take is unknown: none came free\n"));
        response.verdict = Verdict::Never.into();
        let never = [false, true].map(|waits| text(&response, waits));
        assert!(never[0].contains("it is refused if it is submitted now\n"), "{}", never[0]);
        assert!(never[1].contains("it waits for one that registers and can\n"), "{}", never[1]);
        let ordinals = [1, 2, 11, 12, 13, 21, 102, 111, 1013].map(ordinal);
        assert_eq!(ordinals, ["1st", "2nd", "11th", "12th", "13th", "21st", "102nd", "111th", "1013th"]);
    }
}
