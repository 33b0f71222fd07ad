//! The programs that the suite runs.

/// Does nothing, and exits with this.
#[must_use]
pub fn exit(code: u8) -> Vec<String> {
    shell(&format!("exit {code}"))
}

/// Sends itself this signal.
#[must_use]
pub fn signal_itself(number: u8) -> Vec<String> {
    shell(&format!("kill -{number} $$"))
}

/// Runs for longer than any test, and ends by TERM.
#[must_use]
pub fn sleep() -> Vec<String> {
    ["sleep", "1000"].map(str::to_owned).to_vec()
}

/// Says `ready` on standard output, and ignores TERM for longer than any test.
#[must_use]
pub fn stubborn() -> Vec<String> {
    shell("trap '' TERM; echo ready; while :; do sleep 0.1; done")
}

/// Writes `out` to standard output and `err` to standard error.
#[must_use]
pub fn say(out: &str, err: &str) -> Vec<String> {
    shell(&format!("printf %s '{out}'; printf %s '{err}' >&2"))
}

/// Writes so many bytes to standard output: the digits of 0, 1, 2 …, each on a line of ten bytes.
#[must_use]
pub fn count(bytes: u64) -> Vec<String> {
    shell(&format!("seq -f %09.0f 0 {} | head -c {bytes}", bytes / 10))
}

/// What byte `offset` of [`count`] is.
#[must_use]
pub fn counted(offset: u64) -> u8 {
    format!("{:09}\n", offset / 10).as_bytes()[usize::try_from(offset % 10).unwrap_or(0)]
}

/// Copies standard input to standard output.
#[must_use]
pub fn cat() -> Vec<String> {
    vec!["cat".to_owned()]
}

/// Says `ready`, and closes standard input unread; ends by TERM.
#[must_use]
pub fn deaf() -> Vec<String> {
    shell("exec <&-; echo ready; exec sleep 1000")
}

/// Adds a line to a file, and exits.
#[must_use]
pub fn append(path: &str) -> Vec<String> {
    shell(&format!("echo line >> {path}"))
}

/// Adds a line to a file, and runs until it has another line, then exits with 7.
#[must_use]
pub fn append_and_wait_for_another(path: &str) -> Vec<String> {
    shell(&format!(
        "echo line >> {path}; until [ $(wc -l < {path}) -ge 2 ]; do sleep 0.01; done; echo over; exit 7"
    ))
}

/// Leaves something behind that adds lines to a file for ever, and exits when there is one.
#[must_use]
pub fn leave_behind(path: &str) -> Vec<String> {
    let forever = format!("while :; do echo line >> {path}; sleep 0.005; done");
    shell(&format!("(trap '' TERM HUP; {forever}) & until [ -s {path} ]; do sleep 0.01; done; exit 0"))
}

/// Writes its environment to standard output, a line for each variable.
#[must_use]
pub fn environment() -> Vec<String> {
    vec!["env".to_owned()]
}

/// Writes its working directory, its user and group, and the owner of the working directory, a line for each.
#[must_use]
pub fn whereabouts() -> Vec<String> {
    shell("pwd; id -u; id -g; stat -c %u .")
}

/// Says the size of its terminal, rows first, and says it again for each line that it reads, until one is `end`; then exits with 5.
#[must_use]
pub fn window() -> Vec<String> {
    shell("stty -echo; stty size; while read line && [ $line != end ]; do stty size; done; exit 5")
}

/// Something that is there and cannot be executed.
#[must_use]
pub fn not_executable() -> Vec<String> {
    vec!["/etc/passwd".to_owned()]
}

/// Something that is not there.
#[must_use]
pub fn not_there() -> Vec<String> {
    vec!["gantry-no-such-program".to_owned()]
}

fn shell(script: &str) -> Vec<String> {
    ["/bin/sh", "-c", script].map(str::to_owned).to_vec()
}
