//! `gantry explain` and `gantry run --explain`: where a workload would be placed, or why it is not. [`crate::commands::explain::lease`] and [`crate::commands::explain::store`] explain the
//! rest.

use std::time::Duration;

use anyhow::bail;
use prost_types::Timestamp;
use rpc::Reason;
use rpc::pb::runtime::{GetAttendanceRequest, GetAttendanceResponse};
use rpc::pb::scheduler::explain_request::Subject;
use rpc::pb::scheduler::{
    ExplainRequest, ExplainResponse, Verdict, WaitingWorkload, WorkerExplanation, Workload, WorkloadSpec,
    WorkloadState,
};

use crate::cli::args::ExplainArgs;
use crate::cli::values;
use crate::client::connect::{Connection, repeat};
use crate::client::queries;
use crate::commands::explain::lease;
use crate::commands::explain::store;
use crate::ending::error;
use crate::render::json;
use crate::render::labels;
use crate::render::stdout::{print, print_json};
use crate::render::table::{duration, fields, filled, plain, render};

/// How wide a cell is at most: what no sentence of ours comes to.
const WIDTH: usize = 1000;

/// `gantry explain`: the scheduler says why a workload waits, or what became of it, and what a lease is; what it does not know the artifact store may.
pub(crate) async fn whatever(
    connection: &Connection,
    args: &ExplainArgs,
    as_json: bool,
) -> anyhow::Result<()> {
    let Ok(id) = values::any_id(&args.id) else {
        let worker = queries::worker(connection, "explain", &args.id).await?;
        return store::explain(connection, &worker.worker_id, as_json).await;
    };
    let id = id.as_str();
    let told = Told { most: args.workers, only: args.only.clone() };
    let waiting = WaitingWorkload { team: connection.team.clone(), workload_id: id.to_owned() };
    match explain(connection, Subject::Workload(waiting), &told, as_json).await {
        Err(error) if is_for(&error, Reason::WorkloadNotFound) => {
            if lease::explain(connection, id, as_json).await? {
                return Ok(());
            }
            store::explain(connection, id, as_json).await
        }
        Err(error) if is_for(&error, Reason::WorkloadNotQueued) => placed(connection, id, as_json).await,
        answered => answered,
    }
}

fn is_for(error: &anyhow::Error, reason: Reason) -> bool {
    error::refusal(error).is_some_and(|refusal| refusal.is(reason))
}

/// A workload that waits no more: where it runs, or how it ended.
async fn placed(connection: &Connection, id: &str, as_json: bool) -> anyhow::Result<()> {
    let workload = queries::workload(connection, "explain", id).await?;
    if as_json {
        return print_json(&json::workload(&workload));
    }
    let standing = queries::standing(connection, &workload).await?;
    let attendance = attendance(connection, &workload).await;
    print(&waits_no_more(&workload, &standing, attendance.as_ref()))
}

/// Whether the caller of a workload that runs is still there. `None`: its gateway does not say.
async fn attendance(connection: &Connection, workload: &Workload) -> Option<GetAttendanceResponse> {
    let there = workload.whereabouts.clone().filter(|_| workload.state() == WorkloadState::Running)?;
    let request = GetAttendanceRequest {
        team: connection.team.clone(),
        process_id: there.attempt_id,
        worker_id: there.worker_id,
    };
    let mut containers = connection.containers_at(&there.gateway_endpoint).await.ok()?;
    let asked = tokio::time::timeout(GATEWAY_PATIENCE, containers.get_attendance(request)).await;
    Some(asked.ok()?.ok()?.into_inner())
}

/// How long a gateway may take to say whether a caller is attached.
const GATEWAY_PATIENCE: Duration = Duration::from_secs(2);

/// What a process does without its caller.
fn unattended(attendance: &GetAttendanceResponse) -> String {
    let since = attendance.unattended_since.as_ref();
    match (since, attendance.is_left) {
        (Some(since), true) => format!(
            "its caller left {} ago and did not come back: its input has ended, and its output waits for no reader",
            labels::ago(Some(since))
        ),
        (Some(since), false) => {
            let left = attendance.left_at.as_ref().map(labels::instant).unwrap_or_default();
            let ago = labels::ago(Some(since));
            format!(
                "its caller left {ago} ago; unless one attaches before {left}, its input ends and its output waits for no reader"
            )
        }
        (None, _) => String::new(),
    }
}

/// `standing`: how it is with its worker, where that is not as it should be.
fn waits_no_more(workload: &Workload, standing: &str, attendance: Option<&GetAttendanceResponse>) -> String {
    let there = workload.whereabouts.clone().unwrap_or_default();
    let on = match there.worker_name.as_str() {
        "" => String::new(),
        name => format!(" on {}", plain(name, WIDTH)),
    };
    let said = match (labels::outcome(workload.outcome()), workload.state()) {
        (Some(outcome), _) => format!("it has ended{on}: {outcome}"),
        (None, WorkloadState::Assigned | WorkloadState::Starting) => {
            format!("it was placed{on}, and is being started")
        }
        (None, WorkloadState::Running) => format!("it runs{on}"),
        (None, WorkloadState::Settling) => format!("it has ended{on}, and its outputs are being published"),
        (None, state) => format!("it is {}{on}", labels::workload_state(state)),
    };
    let said = match labels::stop_reason(workload.stopping()) {
        "" => said,
        why => format!("{said}, and shall stop ({why})"),
    };
    let its_worker = match standing {
        "" => there.worker_id,
        standing => format!("{} ({standing})", there.worker_id),
    };
    let since = |at: &Option<Timestamp>| {
        at.as_ref().map(|at| format!("{} ({} ago)", labels::instant(at), labels::ago(Some(at))))
    };
    let failure = workload.failure.as_ref().map(|failure| plain(&failure.message, WIDTH));
    let shown = [
        ("worker", its_worker),
        ("attempt", there.attempt_id),
        ("caller", attendance.map(unattended).unwrap_or_default()),
        ("submitted", since(&workload.submitted_at).unwrap_or_default()),
        ("started", since(&workload.started_at).unwrap_or_default()),
        ("finished", since(&workload.finished_at).unwrap_or_default()),
        ("end", labels::end(workload)),
        ("failure", failure.unwrap_or_default()),
    ];
    format!("{said}\n\n{}", fields(&shown))
}

/// `gantry run --explain`
pub(crate) async fn spec(connection: &Connection, spec: WorkloadSpec, as_json: bool) -> anyhow::Result<()> {
    explain(connection, Subject::Spec(spec), &Told::default(), as_json).await
}

/// Which workers are told one by one.
#[derive(Debug, Clone, Default)]
pub(crate) struct Told {
    /// How many at most. 0: as many as the scheduler likes.
    pub(crate) most: u32,
    /// Only these.
    pub(crate) only: Vec<String>,
}

async fn explain(
    connection: &Connection,
    subject: Subject,
    told: &Told,
    as_json: bool,
) -> anyhow::Result<()> {
    let waits = matches!(subject, Subject::Workload(_));
    let request =
        ExplainRequest { subject: Some(subject), max_workers: told.most, workers: told.only.clone() };
    let placements = connection.placements();
    let response =
        repeat("cannot explain it", async || placements.clone().explain(request.clone()).await).await?;
    let are_all_told = told.most == 0 || told.most as usize >= told.only.len();
    if let Some(unknown) = unknown(&told.only, &response).filter(|_| are_all_told) {
        bail!("worker {unknown:?} is unknown; see `gantry list workers`");
    }
    if as_json { print_json(&json::explanation(&response)) } else { print(&text(&response, waits)) }
}

/// The first that was asked for of which nothing was told.
fn unknown<'t>(only: &'t [String], response: &ExplainResponse) -> Option<&'t String> {
    let is_told = |name: &&String| {
        response.workers.iter().any(|worker| worker.worker_name == **name || worker.worker_id == **name)
    };
    only.iter().find(|name| !is_told(name))
}

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
fn text(response: &ExplainResponse, waits: bool) -> String {
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
            "no worker that is known could ever run it: who submits it now is refused\n".to_owned()
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
    use rpc::pb::scheduler::{Failure, Outcome, PlacementRefusal, RefusingWorkers, Whereabouts};

    use super::*;

    #[test]
    fn what_waits_no_more_says_where_it_runs_or_how_it_ended() {
        let there = Whereabouts {
            worker_id: "w".to_owned(),
            worker_name: "big".to_owned(),
            attempt_id: "a".to_owned(),
            ..Default::default()
        };
        let mut workload = Workload {
            state: WorkloadState::Running.into(),
            whereabouts: Some(there),
            started_at: Some(Timestamp { seconds: 60, nanos: 0 }),
            ..Default::default()
        };
        let said = waits_no_more(&workload, "", None);
        assert!(said.starts_with("it runs on big\n"), "{said}");
        workload.stopping = rpc::pb::scheduler::StopReason::Cancelled.into();
        let stops = waits_no_more(&workload, "stalled, silent for 13 s", None);
        assert!(stops.starts_with("it runs on big, and shall stop (CANCELLED)\n"), "{stops}");
        assert!(stops.contains("w (stalled, silent for 13 s)"), "{stops}");
        workload.stopping = 0;
        assert!(said.contains("attempt") && said.contains("1970-01-01"), "{said}");
        workload.state = WorkloadState::Finished.into();
        workload.outcome = Outcome::Errored.into();
        workload.failure = Some(Failure { reason: "RUN_TIMEOUT".to_owned(), message: "too long".to_owned() });
        let said = waits_no_more(&workload, "", None);
        assert!(said.starts_with("it has ended on big: errored\n"), "{said}");
        assert!(said.contains("RUN_TIMEOUT") && said.contains("too long"), "{said}");
    }

    #[test]
    fn a_worker_that_is_unknown_is_noticed() {
        let known = WorkerExplanation {
            worker_name: "one".to_owned(),
            worker_id: "1".to_owned(),
            ..Default::default()
        };
        let response = ExplainResponse { workers: vec![known], ..Default::default() };
        let first = |only: &[&str]| {
            unknown(&only.iter().map(ToString::to_string).collect::<Vec<_>>(), &response).cloned()
        };
        assert_eq!(first(&["one", "1"]), None);
        assert_eq!(first(&["one", "two"]).as_deref(), Some("two"));
        assert_eq!(first(&[]), None);
    }

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
        assert!(never[0].contains("who submits it now is refused\n"), "{}", never[0]);
        assert!(never[1].contains("it waits for one that registers and can\n"), "{}", never[1]);
        let ordinals = [1, 2, 11, 12, 13, 21, 102, 111, 1013].map(ordinal);
        assert_eq!(ordinals, ["1st", "2nd", "11th", "12th", "13th", "21st", "102nd", "111th", "1013th"]);
    }
}
