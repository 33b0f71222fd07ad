//! Text of a snapshot, as wide and as high as the terminal.

use rpc::pb::scheduler::{WorkerState, Workload};

use super::look::{Snapshot, WORKLOADS};
use super::rows::{Row, rows};
use crate::client::transfers::transfers_text;
use crate::render::table::{self, bytes, count, plain, render, width};
use crate::render::{labels, short_ids};

/// Width and height of the text. 0: unlimited.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) columns: usize,
    pub(super) rows: usize,
}

/// Columns between two cells.
const GAP: usize = 2;
/// Maximum number of lines about parts that cannot be read.
const UNSEEN_LINES: usize = 3;
/// Least width of a command, for which other columns are shortened.
const COMMAND_WIDTH: usize = 12;
/// Widths to which names are shortened, one after the other.
const NAME_WIDTHS: [usize; 3] = [20, 12, 8];
/// Least height of a list below the containers: an empty line, the header and one item.
const LEAST_LIST: usize = 3;
/// Part of the height for each list below the containers.
const LIST_DIVISOR: usize = 4;

/// Formats a snapshot. `cluster` names the cluster.
pub(super) fn lines(snapshot: &Snapshot, cluster: &str, size: Size) -> Vec<String> {
    let columns = if size.columns == 0 { usize::MAX } else { size.columns };
    let height = if size.rows == 0 { usize::MAX } else { size.rows };
    let mut lines = vec![head(snapshot, cluster)];
    let unseen = snapshot.unseen.iter().map(|(what, why)| format!("cannot read {what}: {}", plain(why, 200)));
    lines.extend(cut(unseen.collect(), UNSEEN_LINES));
    let list_height = if size.rows == 0 { usize::MAX } else { height / LIST_DIVISOR };
    let lists = [transfers_text(&snapshot.transfers, &snapshot.workers), queue_text(&snapshot.queue)];
    // The head has the numbers of a list for which the terminal is too low.
    let lists = lists.iter().filter(|list| !list.is_empty() && list_height >= LEAST_LIST);
    let lists: Vec<_> =
        lists.flat_map(|list| cut(list.lines().map(str::to_owned).collect(), list_height)).collect();
    let room = height.saturating_sub(lines.len() + lists.len());
    let rows = rows(snapshot);
    if !rows.is_empty() || !snapshot.lacks(WORKLOADS) {
        lines.extend(cut(containers(&rows, columns), room));
    }
    lines.extend(lists);
    lines.truncate(height);
    lines.iter().map(|line| plain(line, columns)).collect()
}

/// Cuts a list to a number of lines, and counts the others.
fn cut(mut lines: Vec<String>, limit: usize) -> Vec<String> {
    if lines.len() > limit {
        let more = lines.len() + 1 - limit;
        lines.truncate(limit.saturating_sub(1));
        if limit > 0 {
            lines.push(format!("… and {}", count(more as u64, "more line")));
        }
    }
    lines
}

fn head(snapshot: &Snapshot, cluster: &str) -> String {
    let Snapshot { at, workers, waiting, transfers, .. } = snapshot;
    let silent = workers.iter().filter(|worker| worker.state() != WorkerState::Running).count();
    let silent = if silent == 0 { String::new() } else { format!(" ({silent} silent)") };
    let used: u64 = workers.iter().map(|worker| u64::from(worker.active_tasks)).sum();
    let slots = workers.iter().map(|worker| u64::from(worker.capacity.unwrap_or_default().max_tasks));
    let is_limited = slots.clone().all(|slots| slots > 0) && !workers.is_empty();
    let slots = if is_limited {
        format!("{used} of {} used", count(slots.sum(), "slot"))
    } else {
        format!("{} used", count(used, "slot"))
    };
    let time = labels::instant(at);
    let time = time.get(11..19).unwrap_or_default();
    format!(
        "{}: {}{silent}, {slots}, {waiting} waiting, {}, {time} UTC",
        plain(cluster, 60),
        count(workers.len() as u64, "worker"),
        count(transfers.len() as u64, "transfer"),
    )
}

/// Formats the workloads that wait. Empty: none.
fn queue_text(queue: &[Workload]) -> String {
    if queue.is_empty() {
        return String::new();
    }
    let row = |workload: &Workload| {
        let spec = workload.spec.clone().unwrap_or_default();
        let name = if spec.name.is_empty() { workload.workload_id.clone() } else { spec.name };
        let why = workload.waiting_for.first().map_or("not considered yet", String::as_str);
        vec![name, spec.team, labels::ago(workload.submitted_at.as_ref()), plain(why, 1000)]
    };
    let rows: Vec<_> = queue.iter().map(row).collect();
    format!("\n{}", render(&["WAITING", "TEAM", "FOR", "REASON"], &rows))
}

/// Column of the table of containers.
struct Column {
    header: &'static str,
    is_number: bool,
    /// Whether the column may be shortened.
    is_name: bool,
    cells: Vec<String>,
}

impl Column {
    fn width(&self) -> usize {
        let cells = self.cells.iter().map(|cell| width(cell));
        cells.max().unwrap_or(0).max(self.header.len())
    }

    fn cell(&self, text: &str, width: usize) -> String {
        let text = plain(text, width);
        let gap = " ".repeat(width.saturating_sub(table::width(&text)));
        if self.is_number { gap + &text } else { text + &gap }
    }
}

/// Formats the table of containers.
fn containers(rows: &[Row], width: usize) -> Vec<String> {
    if rows.is_empty() {
        return vec!["no container runs".to_owned()];
    }
    let mut columns = columns(rows);
    // The command is last, and has the rest of the line.
    let fixed = |columns: &[Column]| columns.iter().map(|column| column.width() + GAP).sum::<usize>();
    let is_too_wide = |columns: &[Column]| fixed(columns) + COMMAND_WIDTH > width;
    if is_too_wide(&columns) {
        columns.retain(|column| column.header != "LIMIT");
    }
    for limit in NAME_WIDTHS {
        if is_too_wide(&columns) {
            for column in columns.iter_mut().filter(|column| column.is_name) {
                column.cells.iter_mut().for_each(|cell| *cell = plain(cell, limit));
            }
        }
    }
    let line = |cells: Vec<&str>, command: &str| {
        let cells = columns.iter().zip(cells).map(|(column, cell)| column.cell(cell, column.width()));
        let mut line = cells.collect::<Vec<_>>().join("  ");
        line.push_str("  ");
        line.push_str(command);
        line.trim_end().to_owned()
    };
    let mut lines = vec![line(columns.iter().map(|column| column.header).collect(), "COMMAND")];
    for (at, row) in rows.iter().enumerate() {
        let cells = columns.iter().map(|column| column.cells[at].as_str()).collect();
        lines.push(line(cells, &plain(&row.command, 1000)));
    }
    lines
}

/// Makes the columns before the command. Columns that say nothing are left out.
fn columns(rows: &[Row]) -> Vec<Column> {
    let unnamed: Vec<_> =
        rows.iter().filter(|row| row.name.is_empty()).map(|row| row.workload_id.as_str()).collect();
    let length = short_ids::length(&unnamed);
    let name = |row: &Row| match row.name.as_str() {
        "" => row.workload_id.chars().take(length).collect(),
        name => plain(name, 255),
    };
    let make = |header, is_number, is_name, cell: &dyn Fn(&Row) -> String| Column {
        header,
        is_number,
        is_name,
        cells: rows.iter().map(cell).collect(),
    };
    let size = |size: Option<u64>| size.map(bytes).unwrap_or_default();
    let columns = vec![
        make("WORKLOAD", false, true, &name),
        make("SERVICE", false, true, &|row| plain(&row.service, 63)),
        make("TEAM", false, true, &|row| plain(&row.team, 64)),
        make("WORKER", false, true, &|row| plain(&row.worker, 255)),
        make("STATE", false, false, &|row| row.state.clone()),
        make("AGE", true, false, &|row| labels::ago(row.since.as_ref())),
        make("CPU", true, false, &|row| {
            row.cpu.map(|used| format!("{:.1}%", used * 100.0)).unwrap_or_default()
        }),
        make("MEMORY", true, false, &|row| size(row.memory_bytes)),
        make("LIMIT", true, false, &|row| size(row.memory_limit_bytes)),
        make("PROCS", true, false, &|row| row.processes.map(|number| number.to_string()).unwrap_or_default()),
    ];
    let says_something = |column: &Column| match column.header {
        "SERVICE" | "LIMIT" => column.cells.iter().any(|cell| !cell.is_empty()),
        "TEAM" => column.cells.iter().any(|cell| *cell != column.cells[0]),
        _ => true,
    };
    columns.into_iter().filter(says_something).collect()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use rpc::pb::runtime::ContainerUsage;
    use rpc::pb::scheduler::{
        AttemptLocation, Capacity, Limits, Service, Worker, WorkloadSpec, WorkloadState,
    };

    use super::super::look::{Measured, container_of};
    use super::*;

    const ATTEMPT: &str = "0197c1a2-0000-7000-8000-000000000001";

    fn snapshot() -> Snapshot {
        let ago = |seconds| Some((SystemTime::now() - Duration::from_secs(seconds)).into());
        let worker = Worker {
            worker_id: "w".to_owned(),
            name: "worker-of-the-first-rack".to_owned(),
            state: WorkerState::Running.into(),
            active_tasks: 2,
            capacity: Some(Capacity { max_tasks: 8, ..Capacity::default() }),
            ..Worker::default()
        };
        let spec = WorkloadSpec {
            team: "main".to_owned(),
            name: "tests".to_owned(),
            command: ["make", "-C", "src", "test", "VERBOSE=1", "JOBS=4"]
                .map(|part| part.as_bytes().into())
                .to_vec(),
            limits: Some(Limits { memory_bytes: 1 << 30, ..Limits::default() }),
            services: vec![Service { name: "db".to_owned(), ..Service::default() }],
            ..WorkloadSpec::default()
        };
        let named = Workload {
            workload_id: "7f3a9c12-0cda-4272-98ab-422792bc0aad".to_owned(),
            spec: Some(spec.clone()),
            state: WorkloadState::Running.into(),
            started_at: ago(300),
            location: Some(AttemptLocation {
                worker_id: "w".to_owned(),
                worker_name: worker.name.clone(),
                attempt_id: ATTEMPT.to_owned(),
                ..AttemptLocation::default()
            }),
            ..Workload::default()
        };
        let unnamed = Workload {
            workload_id: "0b2b86a0-0cda-4272-98ab-422792bc0aad".to_owned(),
            spec: Some(WorkloadSpec { name: String::new(), services: Vec::new(), ..spec.clone() }),
            state: WorkloadState::Starting.into(),
            submitted_at: ago(12),
            started_at: None,
            location: Some(AttemptLocation {
                attempt_id: "0197c1a2-0000-7000-8000-000000000002".to_owned(),
                ..named.location.clone().expect("placed")
            }),
            ..Workload::default()
        };
        let waiting = Workload {
            workload_id: "1c2b86a0-0cda-4272-98ab-422792bc0aad".to_owned(),
            spec: Some(WorkloadSpec { name: "later".to_owned(), ..spec }),
            state: WorkloadState::Pending.into(),
            submitted_at: ago(40),
            waiting_for: vec!["worker one is full".to_owned()],
            ..Workload::default()
        };
        let measured = |id: String, cpu, memory, processes| {
            let usage = ContainerUsage {
                container_id: id.clone(),
                memory_bytes: Some(memory),
                processes: Some(processes),
                ..ContainerUsage::default()
            };
            (id, Measured { usage, cpu: Some(cpu), worker_id: "w".to_owned(), ..Measured::default() })
        };
        let db = container_of(ATTEMPT, "db").expect("an id");
        Snapshot {
            at: prost_types::Timestamp { seconds: 1_700_000_000, nanos: 0 },
            workers: vec![worker],
            placed: vec![unnamed, named],
            queue: vec![waiting],
            waiting: 1,
            usage: [measured(ATTEMPT.to_owned(), 1.5, 300 << 20, 7), measured(db, 0.021, 30 << 20, 3)].into(),
            ..Snapshot::default()
        }
    }

    fn text(columns: usize, rows: usize) -> Vec<String> {
        lines(&snapshot(), "this machine", Size { columns, rows })
    }

    #[test]
    fn snapshot_is_shown_whole_without_terminal() {
        let expected = [
            "this machine: 1 worker, 2 of 8 slots used, 1 waiting, 0 transfers, 22:13:20 UTC",
            "WORKLOAD  SERVICE  WORKER                    STATE      AGE     CPU     MEMORY    LIMIT  PROCS  COMMAND",
            "tests              worker-of-the-first-rack  running  5 min  150.0%  300.0 MiB  1.0 GiB      7  make -C src test VERBOSE=1 JOBS=4",
            "tests     db       worker-of-the-first-rack  running  5 min    2.1%   30.0 MiB               3",
            "0b2b86a0           worker-of-the-first-rack  starting  12 s                     1.0 GiB         make -C src test VERBOSE=1 JOBS=4",
            "",
            "WAITING  TEAM  FOR   REASON",
            "later    main  40 s  worker one is full",
        ];
        let shown = text(0, 0);
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let (shown, expected): (Vec<_>, Vec<_>) = (
            shown.iter().map(|line| words(line)).collect(),
            expected.iter().map(|line| words(line)).collect(),
        );
        assert_eq!(shown, expected);
    }

    #[test]
    fn lines_fit_terminal() {
        for columns in [20, 80, 120, 200] {
            for rows in [1, 2, 3, 5, 10, 24, 50] {
                let shown = text(columns, rows);
                assert!(shown.len() <= rows, "{columns} × {rows}: {shown:#?}");
                let wide = shown.iter().find(|line| width(line) > columns);
                assert_eq!(wide, None, "{columns} × {rows}");
            }
        }
    }

    #[test]
    fn narrow_terminal_keeps_numbers_and_command() {
        let shown = text(80, 24);
        assert!(shown[2].contains("150.0%  300.0 MiB      7  make -C"), "{shown:#?}");
        assert!(shown[2].starts_with("tests") && shown[2].contains("worker-"), "{shown:#?}");
        assert!(!shown[1].contains("LIMIT") && shown[2].ends_with('…'), "{shown:#?}");
        let shown = text(120, 24);
        assert!(shown[1].contains("LIMIT") && shown[2].contains("worker-of-the-first-rack"), "{shown:#?}");
        let shown = text(200, 24);
        assert!(shown[2].ends_with("JOBS=4"), "{shown:#?}");
    }

    #[test]
    fn low_terminal_counts_what_is_missing() {
        let shown = text(120, 3);
        assert!(shown[1].starts_with("WORKLOAD"), "{shown:#?}");
        assert_eq!(shown[2], "… and 3 more lines");
        let shown = text(120, 24);
        assert!(shown.iter().any(|line| line.starts_with("WAITING")), "{shown:#?}");
    }

    #[test]
    fn unread_parts_are_named() {
        let mut snapshot = Snapshot::default();
        snapshot.unseen.push(("transfers".to_owned(), "no answer\u{1b}[2J in time".to_owned()));
        let shown = lines(&snapshot, "ci", Size { columns: 80, rows: 24 });
        assert_eq!(shown[1], "cannot read transfers: no answer?[2J in time");
        assert_eq!(shown[2], "no container runs");
        snapshot.unseen.push((WORKLOADS.to_owned(), "no answer in time".to_owned()));
        let shown = lines(&snapshot, "ci", Size { columns: 80, rows: 24 });
        assert_eq!(shown.len(), 3, "it is unknown what runs: {shown:#?}");
    }
}
