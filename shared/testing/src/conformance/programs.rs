//! The programs that the conformance tests run.
//!
//! A script gets its name as `$0` and its parameters as arguments. A fake runtime recognizes
//! scripts by [`script`].

macro_rules! scripts {
    ($($name:ident = $text:expr;)+) => {
        $(const $name: (&str, &str) = (stringify!($name), $text);)+
        const SCRIPTS: &[(&str, &str)] = &[$($name,)+];
    };
}

scripts! {
    EXIT = "exit $1";
    SIGNAL_ITSELF = "kill -$1 $$";
    STUBBORN = "trap '' TERM; echo ready; while :; do sleep 0.1; done";
    SAY = "printf %s \"$1\"; printf %s \"$2\" >&2";
    COUNT = "seq -f %09.0f 0 $(($1 / 10)) | head -c $1";
    DEAF = "exec <&-; echo ready; exec sleep 1000";
    APPEND = "echo line >> \"$1\"";
    APPEND_AND_WAIT_FOR_ANOTHER = "echo line >> \"$1\"; until [ $(wc -l < \"$1\") -ge 2 ]; do sleep 0.01; done; echo over; exit 7";
    LEAVE_BEHIND = "(trap '' TERM HUP; while :; do echo line >> \"$1\"; sleep 0.005; done) & until [ -s \"$1\" ]; do sleep 0.01; done; exit 0";
    WHEREABOUTS = "pwd; id -u; id -g; stat -c %u .";
    GREEDY = "head -c $1 /dev/zero | tail -c $1 > /dev/null; exit $?";
    HOLD = "x=$(head -c $1 /dev/zero | tr '\\0' x); while :; do :; done";
    FORK = "i=0; while [ $i -lt $1 ]; do sleep 1000 > /dev/null 2>&1 & i=$((i+1)); echo $i; done";
    COMPUTE = "i=0; while [ $i -lt $1 ]; do i=$((i+1)); done";
    TRAP = "trap 'echo INT' INT; trap 'echo HUP' HUP; trap 'echo USR1; exit 3' USR1; echo ready; while :; do sleep 0.05; done";
    LISTEN = "exec python3 -c 'import socket, sys\nserver = socket.create_server((\"127.0.0.1\", int(sys.argv[1])))\nprint(\"ready\", flush=True)\nwhile True: server.accept()' $1";
    CONNECT = "exec python3 -c 'import socket, sys; socket.create_connection((\"127.0.0.1\", int(sys.argv[1])))' $1";
    WINDOW = "stty -echo; stty size; while read line && [ $line != end ]; do stty size; done; exit 5";
}

fn shell((name, text): (&str, &str), arguments: &[&str]) -> Vec<String> {
    ["/bin/sh", "-c", text, name].iter().chain(arguments).map(|part| (*part).to_owned()).collect()
}

/// The name of the script that a command runs, in capitals, and its arguments. `None`: the command
/// runs none of these scripts.
#[must_use]
pub fn script<'c>(command: &[&'c str]) -> Option<(&'static str, Vec<&'c str>)> {
    let ["/bin/sh", "-c", text, name, arguments @ ..] = command else { return None };
    let (name, _) = SCRIPTS.iter().find(|script| **script == (*name, *text))?;
    Some((name, arguments.to_vec()))
}

/// Exits with this code.
#[must_use]
pub fn exit(code: u8) -> Vec<String> {
    shell(EXIT, &[&code.to_string()])
}

/// Sends this signal to itself.
#[must_use]
pub fn signal_itself(number: u8) -> Vec<String> {
    shell(SIGNAL_ITSELF, &[&number.to_string()])
}

/// Runs for longer than any test, and ends on TERM.
#[must_use]
pub fn sleep() -> Vec<String> {
    ["sleep", "1000"].map(str::to_owned).to_vec()
}

/// Prints `ready` on standard output, and ignores TERM for longer than any test.
#[must_use]
pub fn ignore_term() -> Vec<String> {
    shell(STUBBORN, &[])
}

/// Writes `out` to standard output and `err` to standard error.
#[must_use]
pub fn say(out: &str, err: &str) -> Vec<String> {
    shell(SAY, &[out, err])
}

/// Writes `bytes` bytes to standard output: the numbers 0, 1, 2 …, each on a line of ten bytes.
#[must_use]
pub fn count(bytes: u64) -> Vec<String> {
    shell(COUNT, &[&bytes.to_string()])
}

/// The byte at `offset` of the output of [`count`].
#[must_use]
pub fn counted(offset: u64) -> u8 {
    format!("{:09}\n", offset / 10).as_bytes()[usize::try_from(offset % 10).unwrap_or(0)]
}

/// Copies standard input to standard output.
#[must_use]
pub fn cat() -> Vec<String> {
    vec!["cat".to_owned()]
}

/// Prints `ready` and closes standard input without reading it. Ends on TERM.
#[must_use]
pub fn close_input() -> Vec<String> {
    shell(DEAF, &[])
}

/// Appends a line to a file, and exits.
#[must_use]
pub fn append(path: &str) -> Vec<String> {
    shell(APPEND, &[path])
}

/// Appends a line to a file, waits until the file has another line, and exits with 7.
#[must_use]
pub fn append_and_wait_for_another(path: &str) -> Vec<String> {
    shell(APPEND_AND_WAIT_FOR_ANOTHER, &[path])
}

/// Starts a background process that appends lines to a file forever. Exits when the file has a
/// line.
#[must_use]
pub fn leave_behind(path: &str) -> Vec<String> {
    shell(LEAVE_BEHIND, &[path])
}

/// Prints its environment, one variable per line.
#[must_use]
pub fn environment() -> Vec<String> {
    vec!["env".to_owned()]
}

/// Prints its working directory, its user, its group and the owner of the working directory, one
/// per line.
#[must_use]
pub fn location() -> Vec<String> {
    shell(WHEREABOUTS, &[])
}

/// Allocates at least `bytes` bytes of memory, and exits.
#[must_use]
pub fn allocate(bytes: u64) -> Vec<String> {
    shell(GREEDY, &[&bytes.to_string()])
}

/// Holds at least `bytes` bytes of memory and uses a processor for longer than any test. Ends on
/// TERM.
#[must_use]
pub fn hold(bytes: u64) -> Vec<String> {
    shell(HOLD, &[&bytes.to_string()])
}

/// Starts `processes` background processes. Prints the number of processes after each start.
#[must_use]
pub fn fork(processes: u64) -> Vec<String> {
    shell(FORK, &[&processes.to_string()])
}

/// Counts to `rounds`, and exits.
#[must_use]
pub fn compute(rounds: u64) -> Vec<String> {
    shell(COMPUTE, &[&rounds.to_string()])
}

/// Prints `ready`. Prints `INT` and `HUP` on these signals and continues. On USR1 prints `USR1`,
/// and exits with 3.
#[must_use]
pub fn trap() -> Vec<String> {
    shell(TRAP, &[])
}

/// Prints the size of its terminal, rows first, at the start and for each line of input. The line
/// `end` makes it exit with 5.
#[must_use]
pub fn window() -> Vec<String> {
    shell(WINDOW, &[])
}

/// Listens on this port of the loopback, and prints `ready`. Ends on TERM.
#[must_use]
pub fn listen(port: u16) -> Vec<String> {
    shell(LISTEN, &[&port.to_string()])
}

/// Connects to this port of the loopback. Exits with 0, or with 1 if no process listens.
#[must_use]
pub fn connect(port: u16) -> Vec<String> {
    shell(CONNECT, &[&port.to_string()])
}

/// A file that exists and is not executable.
#[must_use]
pub fn not_executable() -> Vec<String> {
    vec!["/etc/passwd".to_owned()]
}

/// A file that does not exist.
#[must_use]
pub fn missing() -> Vec<String> {
    vec!["gantry-no-such-program".to_owned()]
}
