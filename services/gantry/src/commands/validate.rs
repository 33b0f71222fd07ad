//! Checks of arguments before a command starts a cluster, uploads, submits or writes anything.
//!
//! A path may change after its check, so the command itself handles the same errors.

use std::collections::HashSet;
use std::ffi::OsString;
use std::io::{ErrorKind, IsTerminal};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use domain::workload::Image;
use rpc::spec::name::id_range;
use rustix::fs::Access;

use crate::cli::args::{ExecArgs, Global, Kind, ListArgs, RunArgs, ScanArgs, ShowArgs, UploadArgs};
use crate::cli::values::{self, ImageArg, InputArg, Source};
use crate::follow::stdin;
use crate::render::ui::Ui;
use crate::transfer::directories::{is_in_place, refuse_links, refuse_links_here, resolve};
use crate::transfer::ignore;

/// Checks a command that acts only on the cluster on this machine.
pub(crate) fn here(command: &str, global: &Global, ui: &Ui) -> anyhow::Result<()> {
    if global.server_given {
        bail!("`gantry {command}` acts only on the cluster on this machine; leave out --server");
    }
    if global.server.is_some() {
        ui.note(&format!(
            "`gantry {command}` acts on the cluster on this machine, not on that of GANTRY_SERVER"
        ));
    }
    Ok(())
}

/// Checks the arguments of `gantry list`.
pub(crate) fn list(args: &ListArgs) -> anyhow::Result<()> {
    if args.at_risk && args.kind != Some(Kind::Artifacts) {
        bail!("--at-risk is only for artifacts; see `gantry list artifacts --at-risk`");
    }
    if args.worker.is_some() && args.kind != Some(Kind::Leases) {
        bail!("--worker is only for leases; see `gantry list leases --worker NAME`");
    }
    if args.orphans && !matches!(args.kind, Some(Kind::Volumes | Kind::Containers)) {
        bail!("--orphans is only for volumes and containers; see `gantry list volumes --orphans`");
    }
    let has_filter = !args.format.filter.is_empty();
    if has_filter && args.kind.is_none() {
        bail!("--filter needs a kind of objects; see `gantry list workloads --filter state=running`");
    }
    if has_filter && args.orphans {
        bail!("orphans have no filters; leave out --filter");
    }
    if args.state.is_some() && args.kind.is_none() {
        bail!("--state needs a kind of objects; see `gantry list workloads --state running`");
    }
    if args.orphans && args.state.is_some() {
        bail!("orphans have no state; leave out --state");
    }
    Ok(())
}

/// Checks the arguments of `gantry show`.
pub(crate) fn id(args: &ShowArgs) -> anyhow::Result<()> {
    let id = &args.id;
    match args.kind {
        Kind::Workloads if values::workload(id).is_err() => {
            bail!("{id:?} is neither a name nor the beginning of the id of a workload; see `gantry ps -a`")
        }
        Kind::Artifacts if values::artifact(id).is_err() => {
            bail!("{id:?} is not the beginning of the id of an artifact; see `gantry list artifacts`")
        }
        Kind::Volumes if id_range(id).is_none() => {
            bail!("{id:?} is not the beginning of the handle of a volume; see `gantry list volumes`")
        }
        Kind::Containers if id_range(id).is_none() => {
            bail!("{id:?} is not the beginning of the handle of a container; see `gantry list containers`")
        }
        _ => Ok(()),
    }
}

/// Checks the arguments of `gantry exec`.
pub(crate) fn exec(args: &ExecArgs) -> anyhow::Result<()> {
    if let Some(directory) = args.directory.as_ref().filter(|path| !Path::new(path).is_absolute()) {
        bail!("--workdir {directory:?} must be absolute; it is a path in the container");
    }
    if args.tty && args.stdin {
        check_terminal("leave out -t or -i")?;
    }
    Ok(())
}

/// Checks that a person at a terminal can type the input of a process with a terminal.
fn check_terminal(remedy: &str) -> anyhow::Result<()> {
    if !std::io::stdin().is_terminal() {
        bail!("the input device is not a terminal; {remedy}");
    }
    if !stdin::is_readable() {
        bail!("cannot read the terminal, because gantry runs in the background; {remedy}");
    }
    Ok(())
}

/// Checks the arguments of `gantry run`.
pub(crate) fn run(args: &RunArgs) -> anyhow::Result<()> {
    if args.tty && !args.no_stdin && !args.detach && !args.explain {
        check_terminal("leave out -t, or add --no-stdin")?;
    }
    let has_program = !args.command.is_empty() || args.entrypoint.as_ref().is_some_and(|it| !it.is_empty());
    if matches!(args.image, ImageArg::Known(Image::Host | Image::ResourceType(_))) && !has_program {
        bail!("the command is missing; write it after --, as in `gantry run -- echo hello`");
    }
    let mut names = HashSet::new();
    for input in &args.inputs {
        if !names.insert(input.name.as_str()) {
            bail!("two inputs have the name {:?}; give each its own name", input.name);
        }
        check_input(input, args)?;
    }
    let mut names = HashSet::new();
    let mut targets: Vec<(&str, &Path, PathBuf)> = Vec::new();
    for output in &args.outputs {
        let name = output.name.as_str();
        if !names.insert(name) {
            bail!("two outputs have the name {name:?}; give each its own name");
        }
        if args.inputs.iter().any(|input| input.name == name && input.read_only) {
            bail!(
                "output {name:?} cannot start with the input of the same name, because that input is read-only; leave out :ro"
            );
        }
        let Some(directory) = output.directory.as_deref() else { continue };
        if args.detach {
            bail!(
                "cannot download into {directory:?} with --detach; write -o {name}, and use `gantry download` \
                 afterwards"
            );
        }
        let replaces = args.replace && !args.inputs.iter().any(|input| is_in_place(input, output));
        target(directory, replaces, args.allow.follow_links)
            .with_context(|| format!("cannot download output {name:?} into {directory:?}"))?;
        let resolved = resolve(directory).unwrap_or_else(|| directory.to_owned());
        for (other, other_directory, other_resolved) in &targets {
            if resolved == *other_resolved {
                bail!("outputs {other:?} and {name:?} have the same directory; give each its own directory");
            }
            let nested = |(outer, outer_at): (&str, &Path), (inner, inner_at): (&str, &Path)| {
                format!(
                    "the directory {inner_at:?} of output {inner:?} is inside {outer_at:?}, the directory of output {outer:?}; give each its own directory"
                )
            };
            if resolved.starts_with(other_resolved) {
                bail!(nested((*other, *other_directory), (name, directory)));
            }
            if other_resolved.starts_with(&resolved) {
                bail!(nested((name, directory), (*other, *other_directory)));
            }
        }
        targets.push((name, directory, resolved));
    }
    let mut names = HashSet::new();
    for cache in &args.caches {
        if !names.insert(cache.name.as_str()) {
            bail!("two caches have the name {:?}; give each its own name", cache.name);
        }
    }
    if let Some(trace) = &args.trace {
        let links = if args.allow.follow_links { Ok(()) } else { refuse_links_here(trace) };
        links.and_then(|()| file(trace)).with_context(|| format!("cannot write the trace into {trace:?}"))?;
        let resolved = resolve(trace);
        if let Some((name, ..)) = targets.iter().find(|(.., target)| Some(target) == resolved.as_ref()) {
            bail!("cannot write the trace into {trace:?}: that is the directory of output {name:?}");
        }
    }
    Ok(())
}

/// Checks one input. `:ro` at the end always means read-only. If a directory with that name exists,
/// the error says how to write it.
fn check_input(input: &InputArg, args: &RunArgs) -> anyhow::Result<()> {
    let Source::Directory(path) = &input.source else { return Ok(()) };
    if !args.allow.follow_links {
        refuse_links_here(path).with_context(|| format!("cannot upload {path:?}"))?;
    }
    let mut literal = OsString::from(path);
    literal.push(":ro");
    let literal = PathBuf::from(literal);
    if input.read_only && literal.is_dir() {
        let (path, literal) = (path.display(), literal.display());
        bail!(
            "-i {name}={literal} is ambiguous; write {name}={literal}/ for the directory {literal}, or {name}={path}/:ro for \
             {path} read-only",
            name = input.name
        );
    }
    directory(path, &args.scan).with_context(|| format!("cannot upload {path:?}"))
}

/// Checks that a directory and its ignore files can be read.
fn directory(path: &Path, scan: &ScanArgs) -> anyhow::Result<()> {
    if !path.metadata()?.is_dir() {
        bail!("not a directory; only directories can be uploaded");
    }
    std::fs::read_dir(path)?;
    ignore::check(path, scan.gitignore)
}

/// Checks the arguments of `gantry upload`.
pub(crate) fn upload(args: &UploadArgs) -> anyhow::Result<()> {
    directory(&args.directory, &args.scan)?;
    if args.resource_type.is_some() && !args.directory.join("rootfs").is_dir() {
        bail!("the directory has no rootfs/, which the image of a resource type needs");
    }
    Ok(())
}

/// Checks that results can be written into a directory, which need not exist.
pub(crate) fn target(directory: &Path, replace: bool, follow_links: bool) -> anyhow::Result<()> {
    if !follow_links {
        refuse_links(directory)?;
    }
    match directory.metadata() {
        Ok(metadata) if !metadata.is_dir() => bail!("not a directory"),
        Ok(metadata) => {
            let path = directory.canonicalize()?;
            writable(&path).with_context(|| format!("{path:?}"))?;
            if replace {
                crate::transfer::staging::check_replace(&path, &metadata)?;
                ignore::refuse_unsent(&path)?;
            }
            Ok(())
        }
        Err(error) if error.kind() == ErrorKind::NotFound && directory.is_symlink() => {
            bail!("the path is a symbolic link to a missing file")
        }
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            let path = std::path::absolute(directory)?;
            if path.file_name().is_none() || path.ends_with("..") {
                return Err(error.into());
            }
            let there = path.ancestors().skip(1).find(|ancestor| ancestor.symlink_metadata().is_ok());
            let there = there.unwrap_or(Path::new("/"));
            if !there.is_dir() {
                bail!("{there:?} is not a directory");
            }
            writable(there).with_context(|| format!("cannot create a directory in {there:?}"))
        }
        Err(error) => Err(error.into()),
    }
}

/// Checks that a file can be written. The file need not exist, but its directory must.
fn file(path: &Path) -> anyhow::Result<()> {
    match path.metadata() {
        Ok(metadata) if metadata.is_dir() => bail!("the path is a directory"),
        Ok(_) => Ok(rustix::fs::access(path, Access::WRITE_OK).map_err(std::io::Error::from)?),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let path = std::path::absolute(path)?;
            let parent = path.parent().unwrap_or(Path::new("/"));
            if !parent.is_dir() {
                bail!("the directory {parent:?} does not exist");
            }
            writable(parent).with_context(|| format!("cannot create a file in {parent:?}"))
        }
        Err(error) => Err(error.into()),
    }
}

fn writable(directory: &Path) -> anyhow::Result<()> {
    Ok(rustix::fs::access(directory, Access::WRITE_OK | Access::EXEC_OK).map_err(std::io::Error::from)?)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use clap::Parser;

    use super::*;
    use crate::cli::args::{Cli, Command};

    /// Checks a command line, and returns the error, or an empty text. `@` stands for a directory
    /// with the directories `d`, `e` and `e:ro`, the directory `bad` with a malformed ignore file,
    /// the file `f` and the links `nowhere` and `link`.
    fn check_run(arguments: &[&str]) -> String {
        let root = tempfile::tempdir().expect("a directory");
        for name in ["d", "e", "e:ro", "bad"] {
            fs::create_dir(root.path().join(name)).expect("made");
        }
        fs::write(root.path().join("bad/.gantryignore"), "*.o\n[a\n").expect("written");
        fs::write(root.path().join("f"), "").expect("written");
        symlink("gone", root.path().join("nowhere")).expect("linked");
        symlink("d", root.path().join("link")).expect("linked");
        let here = root.path().display().to_string();
        let arguments: Vec<_> = arguments.iter().map(|argument| argument.replace('@', &here)).collect();
        let line = ["gantry", "run"].map(str::to_owned).into_iter().chain(arguments);
        let Command::Run(args) =
            Cli::try_parse_from(line.chain(["true".to_owned()])).expect("parses").command
        else {
            panic!("it is a run")
        };
        let checked = run(&args);
        assert_eq!(fs::read_dir(root.path()).expect("listed").count(), 7, "nothing was made");
        checked.map_or_else(
            |error| crate::ending::error::describe(&error).replace(&here, "@"),
            |()| String::new(),
        )
    }

    #[test]
    fn list_options_are_limited_to_their_kind() {
        let check_list = |line: &str| {
            let line = ["gantry", "list"].into_iter().chain(line.split(' '));
            let Command::List(args) = Cli::try_parse_from(line).expect("parses").command else {
                panic!("it is a list")
            };
            list(&args).map_or_else(|error| error.to_string(), |()| String::new())
        };
        assert_eq!(check_list("artifacts --at-risk"), "");
        let refused = "--at-risk is only for artifacts; see `gantry list artifacts --at-risk`";
        assert_eq!(check_list("workers --at-risk"), refused);
        assert_eq!(check_list("volumes --at-risk"), refused);
        assert_eq!(check_list("leases --worker w"), "");
        let refused = "--worker is only for leases; see `gantry list leases --worker NAME`";
        assert_eq!(check_list("containers --worker w"), refused);
    }

    #[test]
    fn inputs_need_directories_and_unique_names() {
        assert_eq!(check_run(&["-i", "a=@/d", "-i", "b=@/d", "-i", "c=@/link:ro"]), "");
        assert_eq!(check_run(&["-i", "a=@/x"]), "cannot upload \"@/x\": No such file or directory");
        assert_eq!(
            check_run(&["-i", "a=@/f"]),
            "cannot upload \"@/f\": not a directory; only directories can be uploaded"
        );
        assert_eq!(
            check_run(&["-i", "a=@/d", "-i", "a=@/e"]),
            "two inputs have the name \"a\"; give each its own name"
        );
    }

    #[test]
    fn malformed_ignore_file_is_named() {
        assert_eq!(
            check_run(&["-i", "a=@/bad"]),
            "cannot upload \"@/bad\": cannot parse \"@/bad/.gantryignore:2\": the bracket `[` is not closed; write `\\[` for a \
             bracket in a name"
        );
    }

    #[test]
    fn directory_name_with_ro_suffix_is_ambiguous() {
        assert_eq!(
            check_run(&["-i", "a=@/e:ro"]),
            "-i a=@/e:ro is ambiguous; write a=@/e:ro/ for the directory @/e:ro, or a=@/e/:ro for @/e read-only"
        );
        assert_eq!(check_run(&["-i", "a=@/e:ro/", "-i", "b=@/e/:ro", "-i", "c=@/e:ro:ro"]), "");
    }

    #[test]
    fn outputs_need_separate_directories() {
        assert_eq!(check_run(&["-o", "a=@/d", "-o", "b=@/new/deep", "-o", "c", "--replace"]), "");
        assert_eq!(
            check_run(&["-o", "a", "-o", "a"]),
            "two outputs have the name \"a\"; give each its own name"
        );
        assert_eq!(
            check_run(&["-o", "a=@/d", "-o", "b=@/link", "--follow-links"]),
            "outputs \"a\" and \"b\" have the same directory; give each its own directory"
        );
        let nested = "the directory \"@/d/x/y\" of output \"b\" is inside \"@/d\", the directory of output \"a\"; give each its own directory";
        assert_eq!(check_run(&["-o", "a=@/d", "-o", "b=@/d/x/y"]), nested);
        assert_eq!(check_run(&["-o", "b=@/d/x/y", "-o", "a=@/d"]), nested);
        assert_eq!(check_run(&["-o", "a=@/f"]), "cannot download output \"a\" into \"@/f\": not a directory");
        assert_eq!(
            check_run(&["-o", "a=@/f/x/y"]),
            "cannot download output \"a\" into \"@/f/x/y\": \"@/f\" is not a directory"
        );
        for path in ["@/link", "@/link/x", "@/link/x/y", "@/d/../link"] {
            let refused = check_run(&["-o", &format!("a={path}")]);
            let expected = "link\" is a symbolic link to \"d\", which an earlier result may have made; use the target of the \
                            link, or allow it with --follow-links";
            assert!(refused.ends_with(expected), "{refused}");
        }
        assert_eq!(check_run(&["-o", "a=@/link/x", "--follow-links"]), "");
        assert_eq!(
            check_run(&["-o", "a=@/nowhere", "--follow-links"]),
            "cannot download output \"a\" into \"@/nowhere\": the path is a symbolic link to a missing file"
        );
        assert!(check_run(&["-o", "a=/proc/self/x"]).starts_with("cannot download output \"a\" into"));
        assert!(check_run(&["-i", "a=@/d:ro", "-o", "a=@/d"]).ends_with("leave out :ro"));
        assert!(check_run(&["-d", "-o", "a=@/d"]).contains("--detach"));
        assert!(check_run(&["-o", "a=.", "--replace"]).contains("current directory"));
    }

    #[test]
    fn trace_needs_writable_file() {
        assert_eq!(check_run(&["--trace", "@/f"]), "");
        assert_eq!(check_run(&["--trace", "@/new", "-o", "a=@/d"]), "");
        assert_eq!(
            check_run(&["--trace", "@/d"]),
            "cannot write the trace into \"@/d\": the path is a directory"
        );
        assert_eq!(
            check_run(&["--trace", "@/x/y"]),
            "cannot write the trace into \"@/x/y\": the directory \"@/x\" does not exist"
        );
        assert!(check_run(&["--trace", "@/new", "-o", "a=@/new"]).ends_with("the directory of output \"a\""));
    }
}
