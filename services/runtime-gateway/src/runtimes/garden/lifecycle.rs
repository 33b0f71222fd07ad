//! Lifecycle of processes on a Garden worker, from start to end.
//!
//! ```text
//! start:  intent → Run ──────────────────▶ attached → end known → survivors killed, end stored →
//! end reported
//! find:   intent, no end → Attach ───────▶    │  ▲
//!                            ▲                └──┘ the connection broke: Attach, and a gap
//!                            └ not there: never started? ended and forgotten? see `Lost`
//! ```

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use concourse::garden::{self, Error, Exit, Output, Tty, WaitError, WindowSize};
use domain::workload::{EnvironmentVariable, FailureReason, InlineStdin, OutputMode, Stdin};
use domain::{ContainerHandle, ProcessId};
use runtime::{ProcessRole, ProcessSpec, RuntimeError};
use tokio::io::AsyncReadExt;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::runtimes::exit_record::End;
use crate::util::blocking::blocking;
use crate::util::keyed_locks::lock;

use super::containers::{ContainerProperties, user};
use super::output_offsets::{self, SpoolOwner};
use super::process::{InitialState, InputLink, Phase, Process};
use super::{Backend, Worker, errors, process, properties, volumes};

const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Timeout of a query for the process of an earlier gateway.
const LOOK: Duration = Duration::from_secs(30);
/// Time for which a worker may fail to report the state of a process, before its end counts as
/// unknown.
const EXPLAIN: Duration = Duration::from_secs(120);
/// Factor of the spool size for a process with an expected reader, because a Garden process is
/// never blocked.
const ATTACHED: u64 = 16;
/// First offset of a process that was lost with its container and was read by another gateway.
/// Higher than all other offsets.
const LOST: u64 = 1 << 62;
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// How a gateway begins to follow a process.
enum StartMode {
    Run(Box<garden::ProcessSpec>, Stdin),
    /// Attach to the process. The flag tells whether its start is proven.
    Attach {
        proven: bool,
    },
}

/// The result of an attachment.
enum AttachOutcome {
    Process(Box<garden::Process>),
    End(End),
}

pub(super) fn text(bytes: Vec<u8>) -> Result<String, RuntimeError> {
    let no_text = |_| RuntimeError::Unsupported("a Garden worker supports only UTF-8 text".to_owned());
    String::from_utf8(bytes).map_err(no_text)
}

/// Converts variables into Garden's form.
fn variables(variables: Vec<EnvironmentVariable>) -> Result<Vec<String>, RuntimeError> {
    let pair = |EnvironmentVariable { name, value }| Ok(format!("{}={}", text(name)?, text(value)?));
    variables.into_iter().map(pair).collect()
}

/// Converts a process specification into a Garden request.
fn process_request(
    id: ProcessId,
    made: &ContainerProperties,
    spec: ProcessSpec,
) -> Result<garden::ProcessSpec, RuntimeError> {
    let mut command = spec.command.into_iter().map(text);
    let path = command
        .next()
        .ok_or_else(|| RuntimeError::Other("cannot start a process without a program".to_owned()))??;
    let args = command.collect::<Result<Vec<_>, _>>()?;
    let window = |window: runtime::TerminalSize| WindowSize { columns: window.columns, rows: window.rows };
    Ok(garden::ProcessSpec {
        id: id.to_string(),
        path,
        args,
        env: variables(spec.environment)?,
        dir: spec.directory.map(text).transpose()?.unwrap_or_else(|| made.directory.clone()),
        user: spec.user.as_deref().map(user).transpose()?.or_else(|| made.user.clone()).unwrap_or_default(),
        tty: spec.terminal.map(|size| Tty { window_size: Some(window(size)) }),
        ..garden::ProcessSpec::default()
    })
}

impl Worker {
    /// Returns the properties of a container, from memory or from the worker.
    async fn container_properties(
        &self,
        container: ContainerHandle,
    ) -> Result<ContainerProperties, RuntimeError> {
        let known = lock(&self.containers).get(&container).cloned();
        if let Some(known) = known {
            return Ok(known);
        }
        let found = self.properties(container).await?;
        let found = found.ok_or(RuntimeError::ContainerNotFound(container))?;
        lock(&self.containers).insert(container, found.clone());
        Ok(found)
    }

    pub(super) async fn start(
        self: &Arc<Self>,
        container: ContainerHandle,
        id: ProcessId,
        spec: ProcessSpec,
    ) -> Result<(), RuntimeError> {
        let in_container = |process: &Process| {
            let is_here = process.container == container;
            if is_here { Ok(()) } else { Err(RuntimeError::ProcessNotFound(id)) }
        };
        if let Some(process) = self.cached_process(id) {
            return in_container(&process);
        }
        let term = self.term();
        let made = self.container_properties(container).await?;
        let is_further = match made.process {
            Some(process) if process == id => return self.find(id).await.map(|_| ()),
            Some(main) => {
                self.check_joinable(container, main).await?;
                match self.look_for_further(id, self.term()).await {
                    Err(RuntimeError::ProcessNotFound(_)) => {}
                    found => return in_container(&*found?),
                }
                true
            }
            None if spec.role == ProcessRole::Exec => {
                return Err(RuntimeError::ContainerNotRunning(container));
            }
            None => false,
        };
        let terminal = spec.terminal.is_some();
        let (stdin, output) = (spec.stdin.clone(), spec.output);
        let is_text = match &stdin {
            Stdin::Inline(InlineStdin(input)) => std::str::from_utf8(input).is_ok(),
            Stdin::None | Stdin::Attached => true,
        };
        let spec = match process_request(id, &made, spec) {
            Ok(_) if !is_text => {
                Err(End::not_started(FailureReason::Unsupported, "standard input that is not UTF-8"))
            }
            Ok(mut spec) => {
                // The last value of a variable counts.
                let own = self.config.environment.iter().map(|(name, value)| format!("{name}={value}"));
                spec.env.extend(own);
                Ok(spec)
            }
            Err(RuntimeError::Unsupported(message)) => {
                Err(End::not_started(FailureReason::Unsupported, message))
            }
            Err(error) => return Err(error),
        };
        let input = match (terminal, &stdin) {
            (true, _) => Some(properties::TERMINAL),
            (false, Stdin::Inline(_)) => Some(properties::INLINE),
            (false, Stdin::Attached) => Some(properties::STREAM),
            (false, Stdin::None) => None,
        };
        if is_further {
            self.intend_further(container, id, input).await?;
        } else {
            self.intend(container, &made, id, input).await?;
        }

        let spool_bytes = match output {
            OutputMode::Attached => self.config.spool_bytes.saturating_mul(ATTACHED),
            OutputMode::Spooled => self.config.spool_bytes,
        };
        let (phase, stopped) = (Phase::Intended, false);
        let team = made.team.clone();
        let closed = false;
        let known = InitialState {
            id,
            container,
            team,
            terminal,
            is_inline: matches!(stdin, Stdin::Inline(_)),
            is_further,
            closed,
            stopped,
            phase,
            spool_bytes,
            base: 0,
            term,
        };
        let process = self.register_process(known).await?;
        match spec {
            Ok(spec) => self.follow(process, StartMode::Run(Box::new(spec), stdin)),
            Err(end) => self.finish(&process, end).await,
        }
        Ok(())
    }

    /// Returns the main process of a container.
    pub(super) async fn main_of(
        &self,
        container: ContainerHandle,
    ) -> Result<Option<ProcessId>, RuntimeError> {
        Ok(self.container_properties(container).await?.process)
    }

    /// Fails unless the main process of a container runs, so that another process may join it.
    async fn check_joinable(
        self: &Arc<Self>,
        container: ContainerHandle,
        main: ProcessId,
    ) -> Result<(), RuntimeError> {
        if self.backend == Backend::Houdini {
            let message = format!("a second process in container {container}");
            return Err(RuntimeError::Unsupported(message));
        }
        match self.find(main).await?.phase() {
            Phase::Started => Ok(()),
            _ => Err(RuntimeError::ContainerNotRunning(container)),
        }
    }

    /// Stores the intent to start a further process on the container.
    async fn intend_further(
        &self,
        container: ContainerHandle,
        id: ProcessId,
        input: Option<&str>,
    ) -> Result<(), RuntimeError> {
        let name = container.to_string();
        let intent = (properties::of_process(properties::EXEC, id), id.to_string());
        let input = input.map(|input| (properties::of_process(properties::INPUT, id), input.to_owned()));
        for (property, value) in input.into_iter().chain([intent]) {
            match self.garden.set_property(&name, &property, &value).await {
                Err(Error::ContainerNotFound(_)) => return Err(RuntimeError::ContainerNotFound(container)),
                set => set.map_err(|error| errors::garden("store an intent", error))?,
            }
        }
        Ok(())
    }

    /// Finds a further process of an earlier gateway.
    async fn look_for_further(
        self: &Arc<Self>,
        id: ProcessId,
        term: CancellationToken,
    ) -> Result<Arc<Process>, RuntimeError> {
        let filter = BTreeMap::from([(properties::of_process(properties::EXEC, id), id.to_string())]);
        let listed = self.garden.list(&filter).await;
        let listed = listed.map_err(|error| errors::garden("list containers", error))?;
        for handle in listed.iter().filter_map(|handle| handle.parse().ok()) {
            let Some(properties) = self.raw_properties(handle).await? else { continue };
            let Some(made) = self.properties_of(handle, &properties) else { continue };
            let own = |name: &str| {
                let value = properties.get(&properties::of_process(name, id))?;
                Some((name.to_owned(), value.clone()))
            };
            let names = [
                properties::INPUT,
                properties::STARTED,
                properties::READER,
                properties::STOPPED,
                properties::END,
            ];
            let properties: BTreeMap<_, _> = names.into_iter().filter_map(own).collect();
            let made = ContainerProperties { process: Some(id), ..made };
            return self.adopt(handle, made, true, &properties, term).await;
        }
        Err(RuntimeError::ProcessNotFound(id))
    }

    /// Stores the intent to start a process, on the container and on the volume of its root.
    async fn intend(
        &self,
        container: ContainerHandle,
        made: &ContainerProperties,
        id: ProcessId,
        input: Option<&str>,
    ) -> Result<(), RuntimeError> {
        let name = container.to_string();
        let (id_text, failed) = (id.to_string(), |error| errors::garden("store an intent", error));
        // The start request is sent only after all parts of the intent are stored.
        let how_fed = async {
            match input {
                Some(input) => {
                    self.garden.set_property(&name, properties::INPUT, input).await.map_err(failed)
                }
                None => Ok(()),
            }
        };
        let on_container = async {
            match self.garden.set_property(&name, properties::PROCESS, &id_text).await {
                Err(Error::ContainerNotFound(_)) => Err(RuntimeError::ContainerNotFound(container)),
                set => set.map_err(failed),
            }
        };
        let beside = async {
            let Some(root) = made.root else { return Ok(()) };
            let volume = volumes::name(root.to_string())?;
            let set = self.volumes.set_property(&volume, properties::PROCESS, &id_text).await;
            set.map_err(|error| errors::volume("store an intent", root, error))
        };
        // A missing container is reported as missing, independent of the result for its volume.
        let (on_container, beside, how_fed) = tokio::join!(on_container, beside, how_fed);
        on_container.and(beside).and(how_fed)?;
        if let Some(made) = lock(&self.containers).get_mut(&container) {
            made.process = Some(id);
        }
        Ok(())
    }

    /// The environment of a container. The last value of a variable counts.
    pub(super) async fn environment(
        &self,
        made: &ContainerProperties,
        environment: Vec<EnvironmentVariable>,
    ) -> Result<Vec<String>, RuntimeError> {
        let mut all = vec![format!("PATH={PATH}"), format!("HOME={}", self.home(made).await?)];
        all.extend(variables(environment)?);
        Ok(all)
    }

    /// The home directory of the container's user, from the passwd file of the image.
    async fn home(&self, made: &ContainerProperties) -> Result<String, RuntimeError> {
        let user = made.user.as_deref().unwrap_or("root").split(':').next().unwrap_or_default().to_owned();
        if matches!(user.as_str(), "root" | "0") {
            return Ok("/root".to_owned());
        }
        let Some(root) = made.root else { return Ok("/".to_owned()) };
        let name = volumes::name(root.to_string())?;
        let passwd = if made.whole { "etc/passwd" } else { "rootfs/etc/passwd" };
        let passwd = match self.volumes.stream_out(&name, passwd, self.encoding).await {
            Ok(archive) => super::tar_util::file(Box::pin(archive), 16 << 20).await,
            Err(concourse::baggageclaim::Error::NoSuchPath) => return Ok("/".to_owned()),
            Err(error) => return Err(errors::volume("read the users of the image", root, error)),
        };
        let passwd = passwd.map_err(|error| RuntimeError::io("read the users of the image", error))?;
        let passwd = String::from_utf8_lossy(&passwd.unwrap_or_default()).into_owned();
        let lines = passwd.lines().map(|line| line.split(':').collect::<Vec<_>>());
        let mut homes = lines.filter_map(|line| match line[..] {
            [name, _, uid, _, _, home, ..] if name == user || uid == user => Some(home.to_owned()),
            _ => None,
        });
        Ok(homes.next().unwrap_or_else(|| "/".to_owned()))
    }

    async fn register_process(self: &Arc<Self>, known: InitialState) -> Result<Arc<Process>, RuntimeError> {
        let state_dir = self.config.state_dir.clone();
        let process = blocking(move || Process::open(&state_dir, known)).await?;
        lock(&self.processes).insert(process.id, Arc::clone(&process));
        Ok(process)
    }

    /// Returns the process with this id. A process of an earlier gateway is queried, and followed
    /// from now on.
    pub(super) async fn find(self: &Arc<Self>, id: ProcessId) -> Result<Arc<Process>, RuntimeError> {
        let process = match self.cached_process(id) {
            Some(process) => process,
            None => {
                let _turn = self.looking.lock(id.uuid()).await;
                match self.cached_process(id) {
                    Some(process) => process,
                    None => self.look_for(id).await?,
                }
            }
        };
        if process.phase() == Phase::Gone {
            return Err(RuntimeError::ProcessNotFound(id));
        }
        Ok(process)
    }

    async fn look_for(self: &Arc<Self>, id: ProcessId) -> Result<Arc<Process>, RuntimeError> {
        let term = self.term();
        if let Some((handle, properties)) = self.bulk_info(id).await {
            let made = self.properties_of(handle, &properties);
            if let Some(made) = made.filter(|made| made.process == Some(id)) {
                return self.adopt(handle, made, false, &properties, term).await;
            }
        }
        let filter = BTreeMap::from([(properties::PROCESS.to_owned(), id.to_string())]);
        let listed = self.garden.list(&filter).await;
        let listed = listed.map_err(|error| errors::garden("list containers", error))?;
        for handle in listed.iter().filter_map(|handle| handle.parse().ok()) {
            let Some(properties) = self.raw_properties(handle).await? else { continue };
            // The following steps require that this is the intended container.
            let made = self.properties_of(handle, &properties);
            if let Some(made) = made.filter(|made| made.process == Some(id)) {
                return self.adopt(handle, made, false, &properties, term).await;
            }
        }
        match self.look_for_further(id, term.clone()).await {
            Err(RuntimeError::ProcessNotFound(_)) => self.find_by_root_volume(id, term).await,
            found => found,
        }
    }

    fn properties_of(
        &self,
        handle: ContainerHandle,
        properties: &BTreeMap<String, String>,
    ) -> Option<ContainerProperties> {
        let made = ContainerProperties::read(handle, properties)?;
        lock(&self.containers).insert(handle, made.clone());
        Some(made)
    }

    /// Finds a process whose container the worker has lost. The volume of its root still has the
    /// intent.
    async fn find_by_root_volume(
        self: &Arc<Self>,
        id: ProcessId,
        term: CancellationToken,
    ) -> Result<Arc<Process>, RuntimeError> {
        let found = self.volumes.list(&[(properties::PROCESS, &id.to_string())]).await;
        let found = found.map_err(|error| RuntimeError::Other(domain::error_chain(&error)))?;
        if found.is_empty() {
            return Err(RuntimeError::ProcessNotFound(id));
        }
        let end = End::unknown(FailureReason::ExitUnknown, "the worker has lost its container");
        // The property of the last reader was lost with the container. Without spools, the last
        // reader was another gateway.
        let directory = process::directory(&self.config.state_dir, id);
        let base =
            blocking(move || Ok::<_, RuntimeError>(output_offsets::kept(&directory))).await?.unwrap_or(LOST);
        self.register_process(InitialState {
            id,
            // A placeholder, because the container no longer exists.
            container: ContainerHandle::new(),
            team: String::new(),
            terminal: false,
            is_inline: false,
            is_further: false,
            closed: true,
            stopped: false,
            phase: Phase::Ended(end.into()),
            spool_bytes: self.config.spool_bytes,
            base,
            term,
        })
        .await
    }

    async fn adopt(
        self: &Arc<Self>,
        container: ContainerHandle,
        made: ContainerProperties,
        is_further: bool,
        properties: &BTreeMap<String, String>,
        term: CancellationToken,
    ) -> Result<Arc<Process>, RuntimeError> {
        let id = made.process.ok_or(RuntimeError::ContainerNotFound(container))?;
        let end = properties.get(properties::END).and_then(|end| serde_json::from_str::<End>(end).ok());
        let phase = end.map_or(Phase::Starting, |end| Phase::Ended(end.into()));
        let ended = phase != Phase::Starting;
        let reader = if is_further {
            properties::of_process(properties::READER, id)
        } else {
            properties::READER.to_owned()
        };
        let base = self.base(container, id, &reader, properties.get(properties::READER)).await?;
        let process = self
            .register_process(InitialState {
                id,
                container,
                team: made.team,
                terminal: properties
                    .get(properties::INPUT)
                    .is_some_and(|input| input == properties::TERMINAL),
                is_inline: properties.get(properties::INPUT).is_some_and(|input| input == properties::INLINE),
                is_further,
                closed: properties.get(properties::INPUT).is_none_or(|input| input == properties::CLOSED),
                stopped: properties.contains_key(properties::STOPPED),
                phase,
                // The process may have an expected reader.
                spool_bytes: self.config.spool_bytes.saturating_mul(ATTACHED),
                base,
                term,
            })
            .await?;
        if ended {
            return Ok(process);
        }
        let proven = properties.contains_key(properties::STARTED);
        self.follow(Arc::clone(&process), StartMode::Attach { proven });
        // The state of the process depends on the answer of the worker.
        let mut seen = process.seen.subscribe();
        let looked = tokio::time::timeout(LOOK, seen.wait_for(|seen| seen.phase != Phase::Starting)).await;
        match looked {
            Ok(_) => Ok(process),
            Err(_) => {
                Err(RuntimeError::Other("the worker does not report the state of the process".to_owned()))
            }
        }
    }

    /// Returns the first offset of a process that an earlier gateway started.
    async fn base(
        &self,
        container: ContainerHandle,
        id: ProcessId,
        property: &str,
        last: Option<&String>,
    ) -> Result<u64, RuntimeError> {
        let directory = process::directory(&self.config.state_dir, id);
        let (looked, last) = (directory.clone(), last.cloned());
        let next = match blocking(move || {
            Ok::<_, RuntimeError>(output_offsets::spool_owner(&looked, last.as_deref()))
        })
        .await?
        {
            SpoolOwner::Ours { base } => return Ok(base),
            SpoolOwner::Next(next) => next,
        };
        let set = self.garden.set_property(&container.to_string(), property, &next.text()).await;
        set.map_err(|error| errors::garden("store the reader of a process", error))?;
        let base = next.base();
        let failed = |error| RuntimeError::io("create a directory for output", error);
        blocking(move || next.claim(&directory).map_err(failed)).await?;
        Ok(base)
    }

    fn follow(self: &Arc<Self>, process: Arc<Process>, begin: StartMode) {
        let worker = Arc::clone(self);
        self.tasks.spawn(async move {
            tokio::select! {
                () = worker.follow_to_end(&process, begin) => {}
                () = worker.follow_ends(&process) => {}
            }
        });
    }

    /// Resolves when this gateway must no longer follow a process.
    pub(super) async fn follow_ends(&self, process: &Process) {
        tokio::select! {
            () = self.stopping.cancelled() => {}
            () = process.term.cancelled() => {}
        }
    }

    async fn follow_to_end(self: &Arc<Self>, process: &Arc<Process>, begin: StartMode) {
        let mut proven = true;
        let mut refused = None;
        let mut attached = None;
        let mut has_lost_input = false;
        match begin {
            StartMode::Attach { proven: was } => {
                proven = was;
                process.add_gaps();
            }
            StartMode::Run(spec, stdin) => {
                // An earlier stop wins. `Intended` is left only here and by a stop, each in one
                // step.
                if !self.begin(process) {
                    return;
                }
                match self.garden.run(&process.container.to_string(), &spec).await {
                    Ok(run) => {
                        // Nothing can be sent after the end of input. A terminal may be resized, so
                        // its input stays open.
                        let line = if stdin == Stdin::None && spec.tty.is_none() {
                            // If the call fails, the attachment has failed as well.
                            _ = run.control().close_stdin().await;
                            InputLink::Closed
                        } else {
                            InputLink::Up(run.control())
                        };
                        process.set_line(line).await;
                        if let Stdin::Inline(InlineStdin(input)) = stdin {
                            process::send_inline(self, process, input.into());
                        }
                        attached = Some(run);
                    }
                    Err(error) => match errors::run(&error) {
                        Some(end) => return self.finish(process, end).await,
                        None => {
                            proven = matches!(error, Error::Exists(_));
                            process.add_gaps();
                            refused = Some(error);
                        }
                    },
                }
            }
        }
        let end = loop {
            let run = match attached.take() {
                Some(run) => run,
                None => match self.attach_again(process, proven, refused.as_ref()).await {
                    AttachOutcome::Process(run) => {
                        let line =
                            if process.terminal { InputLink::Up(run.control()) } else { InputLink::Broken };
                        if !process.terminal {
                            // Input in transit is lost, so later input would have a gap.
                            _ = run.control().close_stdin().await;
                        }
                        let over = matches!(process.stdin.lock().await.line, InputLink::Closed);
                        process.set_line(if over { InputLink::Closed } else { line }).await;
                        if process.is_inline && !over && !has_lost_input {
                            // The process must not take a part of its input for all of it.
                            has_lost_input = true;
                            self.end_processes(process, true);
                        }
                        *run
                    }
                    AttachOutcome::End(end) => break end,
                },
            };
            let first = !proven || process.phase() != Phase::Started;
            proven = true;
            refused = None;
            match self.read_output(process, run, first).await {
                Ok(_) if has_lost_input => {
                    let message = "the connection to the worker broke while standard input was sent";
                    break End::unknown(FailureReason::ExitUnknown, message);
                }
                Ok(exit) => break self.end(process, exit).await,
                Err(error) => {
                    tracing::info!(process.id = %process.id, error = domain::error_chain(&error), "the worker closed the attachment to a process");
                    let mut stdin = process.stdin.lock().await;
                    if !matches!(stdin.line, InputLink::Closed) {
                        stdin.line = InputLink::Down;
                    }
                    drop(stdin);
                    process.add_gaps();
                }
            }
        };
        self.finish(process, end).await;
    }

    /// Leaves `Intended`, unless the process was stopped before.
    fn begin(&self, process: &Process) -> bool {
        process.seen.send_if_modified(|seen| {
            let begins = seen.phase == Phase::Intended;
            if begins {
                seen.phase = Phase::Starting;
            }
            begins
        })
    }

    /// Reads the output of a process and waits for its end.
    async fn read_output(
        &self,
        process: &Arc<Process>,
        mut run: garden::Process,
        first: bool,
    ) -> Result<Exit, WaitError> {
        process.enter(Phase::Started);
        let outputs = [run.stdout.take(), run.stderr.take()];
        let [stdout, stderr] = outputs;
        let proof = async {
            if first {
                let handle = process.container.to_string();
                // Without the record of the start, another gateway must query the worker, which
                // usually knows.
                let name = process.property(properties::STARTED);
                if let Err(error) = self.garden.set_property(&handle, &name, properties::YES).await {
                    tracing::debug!(process.id = %process.id, error = domain::error_chain(&error), "cannot store the record of a start");
                }
            }
            std::future::pending::<Infallible>().await
        };
        let ended = async { tokio::join!(run.wait(), spool(process, 0, stdout), spool(process, 1, stderr)) };
        // After the end of the process, this is the state that will be stored.
        let (waited, stdout, stderr) = tokio::select! {
            ended = ended => ended,
            never = proof => match never {},
        };
        for spooled in [stdout, stderr] {
            if let Err(error) = spooled {
                tracing::warn!(process.id = %process.id, error = domain::error_chain(&error), "lost some output of a process");
                process.add_gaps();
            }
        }
        waited
    }

    /// Attaches to a process until the worker gives a definite answer. The process is never run
    /// again.
    async fn attach_again(
        &self,
        process: &Process,
        mut proven: bool,
        refused: Option<&Error>,
    ) -> AttachOutcome {
        // The time since which the worker answers without a result. It does not count while the
        // worker is unreachable.
        let mut since = None;
        let mut pause = FIRST_PAUSE;
        loop {
            let handle = process.container.to_string();
            let error = match self.garden.attach(&handle, &process.id.to_string()).await {
                Ok(run) => return AttachOutcome::Process(Box::new(run)),
                Err(error) => error,
            };
            let reachable = !matches!(error, Error::Connection { .. } | Error::ServiceUnavailable(_));
            let missing = matches!(error, Error::ProcessNotFound(_) | Error::ContainerNotFound(_));
            let ended = matches!(error, Error::EndedUnreaped(_));
            if ended {
                // The process ran, even without proof of its start. The worker may report its end
                // in a moment.
                proven = true;
                process.enter(Phase::Started);
            }
            let lost = reachable && matches!(self.exists(process.container).await, Ok(false));
            // The worker reported that it did not run the process, and does not know it.
            if let Some(refused) = refused.filter(|refused| refused.is_answer() && !proven) {
                if lost {
                    let message =
                        format!("the worker has lost the container: {}", domain::error_chain(refused));
                    return AttachOutcome::End(End::not_started(FailureReason::ContainerNotFound, message));
                }
                if missing {
                    return AttachOutcome::End(End::not_started(
                        errors::reason(refused),
                        domain::error_chain(refused),
                    ));
                }
            }
            if lost {
                let reason = if proven { FailureReason::ExitUnknown } else { FailureReason::StartUnknown };
                return AttachOutcome::End(End::unknown(reason, "the worker has lost the container"));
            }
            if missing && proven {
                let message =
                    format!("the worker has forgotten the process: {}", domain::error_chain(&error));
                return AttachOutcome::End(End::unknown(FailureReason::ExitUnknown, message));
            }
            let patience = match (missing, ended) {
                (true, _) => self.config.start_patience,
                (_, true) => self.config.exit_patience,
                (false, false) => EXPLAIN,
            };
            since = if reachable { since.or_else(|| Some(Instant::now())) } else { None };
            if since.is_some_and(|since: Instant| since.elapsed() > patience) {
                let (reason, what) = if proven {
                    (FailureReason::ExitUnknown, "the worker does not report how the process ended")
                } else {
                    (
                        FailureReason::StartUnknown,
                        "the start was requested, and the worker does not report whether the process ran",
                    )
                };
                return AttachOutcome::End(End::unknown(
                    reason,
                    format!("{what}: {}", domain::error_chain(&error)),
                ));
            }
            tokio::time::sleep(pause).await;
            pause = LONGEST_PAUSE.min(pause * 2);
        }
    }

    /// Converts an exit status. Statuses stay as the worker reports them, because it does not tell
    /// which ones above 128 were signals.
    async fn end(&self, process: &Process, exit: Exit) -> End {
        let stopped = process.asked_to_end();
        if exit.status == 137 && self.backend == Backend::Guardian && !process.is_further {
            let info = self.garden.info(&process.container.to_string()).await;
            if info.is_ok_and(|info| info.events.iter().any(|event| event == "oom")) {
                return End::OutOfMemory { stopped };
            }
        }
        // Houdini reports -1 for a process killed by a signal. As a code of eight bits that is 255.
        End::Code { code: u8::try_from(exit.status).unwrap_or(u8::MAX), stopped }
    }

    /// Stores the end, and reports it. After the main process, kills the other processes of the
    /// container.
    async fn finish(&self, process: &Process, end: End) {
        let handle = process.container.to_string();
        let ran = !process.is_further && !matches!(end, End::NotStarted { .. });
        let survivors = async {
            if ran && let Err(error) = self.garden.stop(&handle, true).await {
                tracing::debug!(process.id = %process.id, error = domain::error_chain(&error), "cannot stop the other processes of a container");
            }
        };
        let written = async {
            let written = match serde_json::to_string(&end) {
                Ok(end) => {
                    let set =
                        self.garden.set_property(&handle, &process.property(properties::END), &end).await;
                    set.map_err(|error| domain::error_chain(&error))
                }
                Err(error) => Err(domain::error_chain(&error)),
            };
            // Without this record, another gateway queries the worker, which usually knows.
            if let Err(error) = written {
                tracing::warn!(process.id = %process.id, error, "cannot store the end of a process");
            }
        };
        tokio::join!(survivors, written);
        process.enter(Phase::Ended(end.into()));
        process.line_changed.send_replace(());
    }

    pub(super) async fn stop(
        self: &Arc<Self>,
        process: &Arc<Process>,
        grace: Duration,
    ) -> Result<(), RuntimeError> {
        if matches!(process.phase(), Phase::Ended(_)) {
            return Ok(());
        }
        process.ask_to_end();
        let revoked = process.seen.send_if_modified(|seen| {
            let revoked = seen.phase == Phase::Intended;
            if revoked {
                seen.phase = Phase::Starting;
            }
            revoked
        });
        if revoked {
            let message = "the process was stopped before it was started";
            self.finish(process, End::not_started(FailureReason::StoppedBeforeStart, message)).await;
            return Ok(());
        }
        let kill_at = Instant::now().checked_add(grace);
        let first = process.kill_at.send_if_modified(|known| match (&known, kill_at) {
            (None, at) => {
                // A grace period that overflows the clock is as good as infinite.
                *known =
                    Some(at.unwrap_or_else(|| Instant::now() + Duration::from_secs(u64::from(u32::MAX))));
                true
            }
            (Some(earlier), Some(at)) if at < *earlier => {
                *known = Some(at);
                true
            }
            _ => false,
        });
        if !first {
            return Ok(());
        }
        let handle = process.container.to_string();
        let name = process.property(properties::STOPPED);
        if let Err(error) = self.garden.set_property(&handle, &name, properties::YES).await {
            tracing::debug!(process.id = %process.id, error = domain::error_chain(&error), "cannot store the stop of a process");
        }
        self.end_by(process);
        Ok(())
    }

    /// Ends a process within its grace period: TERM now, KILL at its end. Each shorter grace period
    /// starts another call of this function.
    fn end_by(self: &Arc<Self>, process: &Arc<Process>) {
        let (worker, process) = (Arc::clone(self), Arc::clone(process));
        self.tasks.spawn(async move {
            let over = |seen: &super::process::Progress| matches!(seen.phase, Phase::Ended(_) | Phase::Gone);
            let (mut seen, mut ended) = (process.seen.subscribe(), process.seen.subscribe());
            let work = async {
                // A process that does not run yet would not receive the signal.
                if seen.wait_for(|seen| seen.phase != Phase::Starting).await.is_err() {
                    return;
                }
                let handle = process.container.to_string();
                loop {
                    let kill_at = process.kill_at.borrow().unwrap_or_else(Instant::now);
                    let kill = kill_at <= Instant::now();
                    let stop = worker.stop_process(&process, &handle, kill);
                    tokio::select! {
                        // The worker waits until the processes have ended. Without KILL it kills
                        // them itself after ten seconds.
                        stopped = stop => {
                            match stopped {
                                Ok(()) => {}
                                // The lease keeps its slot. The cause may pass later.
                                Err(error @ Error::DoesNotEnd(_)) => {
                                    tracing::warn!(process.id = %process.id, error = domain::error_chain(&error), "a process was killed and has not ended");
                                }
                                Err(error) => {
                                    tracing::debug!(process.id = %process.id, error = domain::error_chain(&error), "cannot stop a process");
                                }
                            }
                        }
                        () = tokio::time::sleep_until(kill_at), if !kill => continue,
                    }
                    tokio::time::sleep(LONGEST_PAUSE.min(Duration::from_millis(200))).await;
                }
            };
            tokio::select! {
                () = work => {}
                _ = ended.wait_for(over) => {}
                () = worker.follow_ends(&process) => {}
            }
        });
    }

    /// Stops a process. The call of the worker stops all processes of a container, so a further
    /// process receives a signal, which a containerd worker ignores.
    async fn stop_process(&self, process: &Process, handle: &str, kill: bool) -> Result<(), Error> {
        if !process.is_further {
            return self.garden.stop(handle, kill).await;
        }
        if let Ok(stdin) = process.stdin.try_lock()
            && let InputLink::Up(control) = &stdin.line
        {
            let signal = if kill { garden::Signal::Kill } else { garden::Signal::Terminate };
            // A broken connection is found by the task that follows the process.
            control.signal(signal).await.ok();
        }
        Ok(())
    }

    /// Stops the processes of a container once, by the call of the worker. This does not count as a
    /// stop of the process.
    pub(super) fn end_processes(self: &Arc<Self>, process: &Arc<Process>, kill: bool) {
        let (worker, process) = (Arc::clone(self), Arc::clone(process));
        self.tasks.spawn(async move {
            let handle = process.container.to_string();
            tokio::select! {
                stopped = worker.garden.stop(&handle, kill) => {
                    if let Err(error) = stopped {
                        tracing::warn!(process.id = %process.id, error = domain::error_chain(&error), "cannot send a signal to a process");
                    }
                }
                () = worker.follow_ends(&process) => {}
            }
        });
    }
}

/// Copies an output into its spool, to its end.
async fn spool(process: &Process, which: usize, output: Option<Output>) -> io::Result<()> {
    let Some(mut output) = output else { return Ok(()) };
    let mut spool = process.writer(which)?;
    let mut buffer = vec![0; 256 << 10];
    loop {
        let read = match output.read(&mut buffer).await {
            Ok(0) => return Ok(()),
            Ok(read) => read,
            // The wait reports that the connection broke.
            Err(_) => return Ok(()),
        };
        let write = move || {
            let pushed = spool.push(&buffer[..read]);
            Ok::<_, RuntimeError>((spool, buffer, pushed))
        };
        let (kept, room, pushed) = blocking(write).await.map_err(io::Error::other)?;
        (spool, buffer) = (kept, room);
        let head = spool.head();
        process.seen.send_modify(|seen| seen.heads[which] = head);
        pushed?;
    }
}
