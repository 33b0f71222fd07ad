//! Refusals: the reasons why a worker does not take a request.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;

use domain::workload::Failure;

use super::types::Resources;

/// One reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The worker is lost.
    Lost,
    /// The worker was lost minutes ago, and may return.
    JustLost,
    /// The worker was removed minutes ago, and may be replaced.
    Gone,
    /// The worker is retired.
    Retiring,
    /// The gateway supports only these protocol versions.
    Incompatible(Vec<u32>),
    /// An attempt at the same workload could not be started on the worker.
    FailedWorker(Failure),
    /// The worker has another platform.
    Platform(String),
    /// The worker belongs to another team.
    Team,
    /// The worker takes only workloads with tags.
    OnlyTagged(Vec<String>),
    /// The worker lacks these tags.
    MissingTags(Vec<String>),
    /// The worker cannot run this kind of image.
    ImageKind(Cow<'static, str>),
    /// The worker provides no image for this resource type.
    ResourceType(String),
    /// The runtime lacks this capability.
    Capability(Cow<'static, str>),
    /// The request exceeds the total capacity.
    TooSmall(Shortage),
    /// The request avoids the worker.
    Avoided,
    /// The request is tied to another worker.
    NotSame,
    /// The request names another worker.
    NotNamed,
    /// The worker is cordoned.
    Cordoned,
    /// The worker is out of contact.
    Stalled,
    /// The worker is quarantined, or on probation with one task.
    Quarantined(String),
    /// The team uses only its own workers.
    TeamKeepsToItsOwn,
    /// The worker is reserved for another request.
    Reserved,
    /// Less than these bytes of the worker's disk are free.
    DiskPressure(u64),
    /// All slots are in use.
    Full { active: u32, max: u32 },
    /// The worker has reached its limit of containers.
    FullOfContainers { count: u64, max: u32 },
    /// The worker has reached its limit of volumes.
    FullOfVolumes { count: u64, max: u32 },
    /// The free capacity is less than requested.
    Short(Shortage),
}

/// A requested amount that exceeds what the worker has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Shortage {
    pub(crate) of: Resource,
    pub(crate) requested: u64,
    pub(crate) left: u64,
}

/// A countable resource of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Resource {
    /// Thousandths of a processor.
    Cpu,
    /// Bytes.
    Memory,
    /// Bytes.
    Disk,
}

/// All codes of [`Refusal::code`].
pub(crate) const CODES: [&str; 27] = [
    "LOST",
    "JUST_LOST",
    "GONE",
    "RETIRING",
    "INCOMPATIBLE",
    "FAILED_THERE",
    "PLATFORM",
    "TEAM",
    "ONLY_TAGGED",
    "MISSING_TAGS",
    "IMAGE_KIND",
    "RESOURCE_TYPE",
    "CAPABILITY",
    "TOO_SMALL",
    "AVOIDED",
    "NOT_SAME",
    "NOT_NAMED",
    "CORDONED",
    "STALLED",
    "QUARANTINED",
    "TEAM_KEEPS_TO_ITS_OWN",
    "RESERVED",
    "DISK_PRESSURE",
    "FULL",
    "FULL_OF_CONTAINERS",
    "FULL_OF_VOLUMES",
    "SHORT",
];

impl Refusal {
    /// Returns whether waiting may end the refusal.
    pub(crate) fn passes(&self) -> bool {
        match self {
            Self::JustLost
            | Self::Gone
            | Self::Cordoned
            | Self::Stalled
            | Self::Quarantined(_)
            | Self::TeamKeepsToItsOwn
            | Self::Reserved
            | Self::DiskPressure(_)
            | Self::Full { .. }
            | Self::FullOfContainers { .. }
            | Self::FullOfVolumes { .. }
            | Self::Short(_) => true,
            Self::Lost
            | Self::Retiring
            | Self::Incompatible(_)
            | Self::FailedWorker(_)
            | Self::Platform(_)
            | Self::Team
            | Self::OnlyTagged(_)
            | Self::MissingTags(_)
            | Self::ImageKind(_)
            | Self::ResourceType(_)
            | Self::Capability(_)
            | Self::TooSmall(_)
            | Self::Avoided
            | Self::NotSame
            | Self::NotNamed => false,
        }
    }

    /// Returns the sort key of refusals: lasting ones first, then those that do not depend on load.
    pub(super) fn order(&self) -> impl Ord + use<> {
        let is_of_worker = matches!(
            self,
            Self::JustLost | Self::Gone | Self::Cordoned | Self::Stalled | Self::Quarantined(_)
        );
        (self.passes(), self.passes() && !is_of_worker)
    }

    /// Returns the reason code of the API.
    pub(crate) fn code(&self) -> &'static str {
        match self {
            Self::Lost => "LOST",
            Self::JustLost => "JUST_LOST",
            Self::Gone => "GONE",
            Self::Retiring => "RETIRING",
            Self::Incompatible(_) => "INCOMPATIBLE",
            Self::FailedWorker(_) => "FAILED_THERE",
            Self::Platform(_) => "PLATFORM",
            Self::Team => "TEAM",
            Self::OnlyTagged(_) => "ONLY_TAGGED",
            Self::MissingTags(_) => "MISSING_TAGS",
            Self::ImageKind(_) => "IMAGE_KIND",
            Self::ResourceType(_) => "RESOURCE_TYPE",
            Self::Capability(_) => "CAPABILITY",
            Self::TooSmall(_) => "TOO_SMALL",
            Self::Avoided => "AVOIDED",
            Self::NotSame => "NOT_SAME",
            Self::NotNamed => "NOT_NAMED",
            Self::Cordoned => "CORDONED",
            Self::Stalled => "STALLED",
            Self::Quarantined(_) => "QUARANTINED",
            Self::TeamKeepsToItsOwn => "TEAM_KEEPS_TO_ITS_OWN",
            Self::Reserved => "RESERVED",
            Self::DiskPressure(_) => "DISK_PRESSURE",
            Self::Full { .. } => "FULL",
            Self::FullOfContainers { .. } => "FULL_OF_CONTAINERS",
            Self::FullOfVolumes { .. } => "FULL_OF_VOLUMES",
            Self::Short(_) => "SHORT",
        }
    }

    /// Describes what would end the refusal, for people.
    pub(crate) fn ended_by(&self) -> String {
        match self {
            Self::Lost | Self::JustLost | Self::Stalled => "its gateway is in contact again".to_owned(),
            Self::Gone | Self::Retiring => "another worker takes its place".to_owned(),
            Self::Incompatible(_) => "its gateway, or the scheduler, is of another version".to_owned(),
            Self::FailedWorker(_) => "the workload is submitted again".to_owned(),
            Self::Platform(platform) => format!("the workload requests platform {platform}"),
            Self::Team => "it serves all teams, or this one".to_owned(),
            Self::OnlyTagged(tags) => format!("the workload requests one of its tags: {}", tags.join(", ")),
            Self::MissingTags(tags) => format!("it has the {}", named(tags)),
            Self::ImageKind(kind) => format!("it can run {kind} images"),
            Self::ResourceType(name) => {
                format!("it provides an image of the resource type {name}, or the cluster has one")
            }
            Self::Capability(name) => format!("its runtime has {name}"),
            Self::TooSmall(shortage) => format!("no more than {} is requested", shortage.left()),
            Self::Avoided => "the request does not avoid it".to_owned(),
            Self::NotSame => "the request is not tied to another worker".to_owned(),
            Self::NotNamed => "the request does not name another worker".to_owned(),
            Self::Cordoned => "it is uncordoned".to_owned(),
            Self::Quarantined(_) => "its quarantine ends and a process starts on it".to_owned(),
            Self::TeamKeepsToItsOwn => "one of the team's own workers has room".to_owned(),
            Self::Reserved => "the request that it is reserved for is placed".to_owned(),
            Self::DiskPressure(min) => format!("{} of its disk are free: see `gantry gc`", rounded(*min)),
            Self::Full { .. } => "one of its tasks ends".to_owned(),
            Self::FullOfContainers { .. } => "one of its containers is deleted".to_owned(),
            Self::FullOfVolumes { .. } => "some of its volumes are deleted".to_owned(),
            Self::Short(shortage) => format!("{} is free on it", shortage.requested()),
        }
    }

    /// Describes what would end the refusal for one of many workers.
    pub(crate) fn ended_by_of_many(&self) -> String {
        match self {
            Self::OnlyTagged(tags) if tags.is_empty() => "the workload requests its tags".to_owned(),
            Self::DiskPressure(_) => "space on a disk becomes free: see `gantry gc`".to_owned(),
            Self::Full { .. } => "a task ends".to_owned(),
            Self::FullOfContainers { .. } => "a container is deleted".to_owned(),
            Self::FullOfVolumes { .. } => "some volumes are deleted".to_owned(),
            Self::TooSmall(shortage) => format!("less {} is requested", shortage.of()),
            one => one.ended_by(),
        }
    }

    /// Removes details that differ between workers with the same refusal.
    pub(crate) fn in_common(self) -> Self {
        match self {
            Self::OnlyTagged(_) => Self::OnlyTagged(Vec::new()),
            Self::Incompatible(_) => Self::Incompatible(Vec::new()),
            Self::Quarantined(_) => Self::Quarantined(String::new()),
            Self::DiskPressure(_) => Self::DiskPressure(0),
            other => other,
        }
    }

    /// Returns the reached limit: its name, the limit, and the present or requested amount.
    pub(crate) fn limit(&self) -> Option<(&'static str, u64, u64)> {
        match self {
            Self::Full { active, max } => Some(("tasks", u64::from(*max), u64::from(*active))),
            Self::FullOfContainers { count, max } => Some(("containers", u64::from(*max), *count)),
            Self::FullOfVolumes { count, max } => Some(("volumes", u64::from(*max), *count)),
            Self::TooSmall(shortage) | Self::Short(shortage) => {
                Some((shortage.of.name(), shortage.left, shortage.requested))
            }
            _ => None,
        }
    }

    /// Returns the labels that the refusal is about.
    pub(crate) fn labels(&self) -> Vec<String> {
        match self {
            Self::Platform(name) | Self::ResourceType(name) => vec![name.clone()],
            Self::OnlyTagged(tags) | Self::MissingTags(tags) => tags.clone(),
            Self::ImageKind(name) | Self::Capability(name) => vec![name.clone().into_owned()],
            _ => Vec::new(),
        }
    }

    /// Returns a bit that distinguishes the refusals of workers of one class.
    pub(super) fn mark(&self) -> u32 {
        let number = match self {
            Self::NotSame => 0,
            Self::Avoided => 1,
            Self::FailedWorker(_) => 2,
            Self::TeamKeepsToItsOwn => 3,
            Self::Quarantined(_) => 4,
            Self::Full { .. } => 5,
            Self::FullOfContainers { .. } => 6,
            Self::FullOfVolumes { .. } => 7,
            Self::TooSmall(shortage) => 8 + shortage.of as u32,
            Self::Short(shortage) => 11 + shortage.of as u32,
            Self::Reserved => 14,
            Self::NotNamed => 15,
            Self::DiskPressure(_) => 16,
            _ => 31,
        };
        1 << number
    }

    /// Returns whether only the present load causes the refusal.
    pub(super) fn is_for_load(&self) -> bool {
        matches!(
            self,
            Self::Full { .. } | Self::FullOfContainers { .. } | Self::FullOfVolumes { .. } | Self::Short(_)
        )
    }

    /// Returns whether both have the same [`Refusal::of_many`].
    fn is_like(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Incompatible(_), Self::Incompatible(_))
            | (Self::FailedWorker(_), Self::FailedWorker(_))
            | (Self::Quarantined(_), Self::Quarantined(_))
            | (Self::DiskPressure(_), Self::DiskPressure(_))
            | (Self::Full { .. }, Self::Full { .. })
            | (Self::FullOfContainers { .. }, Self::FullOfContainers { .. })
            | (Self::FullOfVolumes { .. }, Self::FullOfVolumes { .. }) => true,
            (Self::TooSmall(one), Self::TooSmall(two)) | (Self::Short(one), Self::Short(two)) => {
                one.of == two.of
            }
            (one, two) => one == two,
        }
    }

    /// Describes the refusal for many workers, without details that differ.
    pub(crate) fn of_many(&self) -> String {
        match self {
            Self::Lost => "are lost".to_owned(),
            Self::JustLost => "were lost minutes ago".to_owned(),
            Self::Gone => "went away minutes ago".to_owned(),
            Self::Retiring => "are retiring".to_owned(),
            Self::Incompatible(_) => "have gateways with other protocol versions".to_owned(),
            Self::FailedWorker(_) => "could not start the workload".to_owned(),
            Self::Platform(platform) => format!("are of platform {platform}"),
            Self::Team => "serve other teams".to_owned(),
            Self::OnlyTagged(tags) if tags.is_empty() => "serve only workloads with their tags".to_owned(),
            Self::OnlyTagged(tags) => format!("serve only workloads tagged {}", tags.join(", ")),
            Self::MissingTags(tags) => format!("lack the {}", named(tags)),
            Self::ImageKind(kind) => format!("cannot run {kind} images"),
            Self::ResourceType(name) => format!("have no image of the resource type {name}"),
            Self::Capability(name) => format!("have a runtime that lacks {name}"),
            Self::TooSmall(shortage) => format!("have less {} than requested", shortage.of()),
            Self::Avoided => "are avoided by the request".to_owned(),
            Self::NotSame => "are not the requested worker".to_owned(),
            Self::NotNamed => "are not the worker that the request names".to_owned(),
            Self::Cordoned => "are cordoned".to_owned(),
            Self::Stalled => "are out of contact".to_owned(),
            Self::Quarantined(_) => "are quarantined after repeated failures".to_owned(),
            Self::TeamKeepsToItsOwn => "serve all teams, and this team uses only its own workers".to_owned(),
            Self::Reserved => "are reserved for large requests that have waited long".to_owned(),
            Self::DiskPressure(_) => "have nearly full disks".to_owned(),
            Self::Full { .. } => "are full".to_owned(),
            Self::FullOfContainers { .. } => "have reached their limit of containers".to_owned(),
            Self::FullOfVolumes { .. } => "have reached their limit of volumes".to_owned(),
            Self::Short(shortage) => format!("have too little {} left", shortage.of()),
        }
    }
}

/// Formats tags: "tag gpu", "tags gpu, large".
fn named(tags: &[String]) -> String {
    let noun = if tags.len() == 1 { "tag" } else { "tags" };
    format!("{noun} {}", tags.join(", "))
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost => f.write_str("is lost"),
            Self::JustLost => f.write_str("was lost minutes ago"),
            Self::Gone => f.write_str("went away minutes ago"),
            Self::Retiring => f.write_str("is retiring"),
            Self::Incompatible(versions) => {
                let versions: Vec<_> = versions.iter().map(ToString::to_string).collect();
                let versions = if versions.is_empty() { "no".to_owned() } else { versions.join(", ") };
                write!(f, "its gateway supports only other protocol versions ({versions})")
            }
            Self::FailedWorker(failure) => {
                write!(f, "could not start the workload: {} ({})", failure.message, failure.reason)
            }
            Self::Platform(platform) => write!(f, "its platform is {platform}"),
            Self::Team => f.write_str("serves another team"),
            Self::OnlyTagged(tags) => write!(f, "serves only workloads tagged {}", tags.join(", ")),
            Self::MissingTags(tags) => write!(f, "lacks the {}", named(tags)),
            Self::ImageKind(kind) => write!(f, "cannot run {kind} images"),
            Self::ResourceType(name) => write!(f, "has no image of the resource type {name}"),
            Self::Capability(name) => write!(f, "its runtime lacks {name}"),
            Self::TooSmall(shortage) => {
                write!(f, "has {} in all, but {} is requested", shortage.left(), shortage.requested())
            }
            Self::Avoided => f.write_str("is avoided by the request"),
            Self::NotSame => f.write_str("is not the requested worker"),
            Self::NotNamed => f.write_str("the request names another worker"),
            Self::Cordoned => f.write_str("is cordoned"),
            Self::Stalled => f.write_str("is out of contact"),
            Self::Quarantined(why) => write!(f, "is quarantined after repeated failures: {why}"),
            Self::TeamKeepsToItsOwn => {
                f.write_str("serves all teams, and this team uses only its own workers")
            }
            Self::Reserved => f.write_str("is reserved for a large request that has waited long"),
            Self::DiskPressure(min) => write!(f, "has less than {} of its disk free", rounded(*min)),
            Self::Full { active, max } => write!(f, "is full ({active} of {max} tasks)"),
            Self::FullOfContainers { count, max } => write!(f, "has {count} of {max} containers"),
            Self::FullOfVolumes { count, max } => write!(f, "has {count} of {max} volumes"),
            Self::Short(shortage) => {
                write!(f, "has {} left, but {} is requested", shortage.left(), shortage.requested())
            }
        }
    }
}

impl Resource {
    fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu_millis",
            Self::Memory => "memory_bytes",
            Self::Disk => "disk_bytes",
        }
    }
}

impl Shortage {
    fn of(self) -> &'static str {
        match self.of {
            Resource::Cpu => "processor time",
            Resource::Memory => "memory",
            Resource::Disk => "disk",
        }
    }

    fn amount(self, amount: u64) -> String {
        match self.of {
            Resource::Cpu => cores(amount),
            Resource::Memory => format!("{} of memory", self.size(amount)),
            Resource::Disk => format!("{} of disk", self.size(amount)),
        }
    }

    /// Formats a size in rounded units, or in bytes if the requested and the free amount would look
    /// equal.
    fn size(self, bytes: u64) -> String {
        match (rounded(self.requested), rounded(self.left)) {
            (requested, left) if requested != left => rounded(bytes),
            _ => format!("{bytes} bytes"),
        }
    }

    fn requested(self) -> String {
        self.amount(self.requested)
    }

    fn left(self) -> String {
        self.amount(self.left)
    }
}

impl Resources {
    /// Describes the requested amounts, for people.
    pub(crate) fn words(&self) -> Vec<String> {
        let Self { cpu_millis, memory_bytes, disk_bytes } = *self;
        let requested = [
            (cpu_millis, cores(cpu_millis)),
            (memory_bytes, format!("{} of memory", rounded(memory_bytes))),
            (disk_bytes, format!("{} of disk", rounded(disk_bytes))),
        ];
        requested.into_iter().filter(|(amount, _)| *amount > 0).map(|(_, words)| words).collect()
    }
}

/// Formats cores, for example `1.5 cores`.
fn cores(millis: u64) -> String {
    match millis {
        1000 => "1 core".to_owned(),
        _ => {
            let (whole, rest) = (millis / 1000, millis % 1000);
            let rest = format!(".{rest:03}");
            format!("{whole}{} cores", rest.trim_end_matches('0').trim_end_matches('.'))
        }
    }
}

/// Formats a size, for example `1.5 GiB`.
fn rounded(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    // Each unit is 1024 times the previous one.
    let Some(unit) = bytes.checked_ilog2().map(|power| power / 10).filter(|unit| *unit > 0) else {
        return format!("{bytes} bytes");
    };
    let unit = unit.min(5);
    let name = units.get(unit as usize - 1).copied().unwrap_or("PiB");
    format!("{:.1} {name}", bytes as f64 / 1024_f64.powf(f64::from(unit)))
}

/// Maximum number of workers that are listed individually.
const MAX_LISTED: usize = 10;

/// Maximum number of names of a group.
const NAMED: usize = 3;

/// The refusals of all workers. Many workers are grouped by reason.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Refusals(Vec<Group>);

/// Workers with the same refusal.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Group {
    refusal: Refusal,
    count: usize,
    /// Some of their names, or all if they are few.
    names: Vec<String>,
}

impl Refusals {
    /// Collects the refusals of named workers.
    #[cfg(test)]
    pub(super) fn of(refusals: impl IntoIterator<Item = (String, Refusal)>) -> Self {
        let mut all = Self::default();
        for (name, refusal) in refusals {
            all.add(refusal, 1, || std::iter::once(name));
        }
        all.sorted()
    }

    /// Adds `count` workers with this refusal, and as many of their `names` as are listed.
    pub(super) fn add<I: Iterator<Item = String>>(
        &mut self,
        refusal: Refusal,
        count: usize,
        names: impl FnOnce() -> I,
    ) {
        let alike = |group: &&mut Group| group.refusal.is_like(&refusal);
        // A few workers keep their individual numbers.
        if self.count() + count > MAX_LISTED
            && let Some(group) = self.0.iter_mut().find(alike)
        {
            group.count += count;
            let more = NAMED.saturating_sub(group.names.len());
            group.names.extend(names().take(more));
            return;
        }
        let names = names().take(if count <= MAX_LISTED { count } else { NAMED }).collect();
        self.0.push(Group { refusal, count, names });
    }

    /// Sorts the refusals, independent of the order of workers.
    pub(super) fn sorted(mut self) -> Self {
        if self.count() <= MAX_LISTED {
            self.0.sort_by(|one, other| one.names.cmp(&other.names));
            return self;
        }
        let mut groups: Vec<Group> = Vec::new();
        for group in self.0 {
            match groups.iter_mut().find(|known| known.refusal.is_like(&group.refusal)) {
                Some(known) => {
                    known.count += group.count;
                    known.names.extend(group.names);
                }
                None => groups.push(group),
            }
        }
        for group in &mut groups {
            group.names.sort();
            group.names.truncate(NAMED);
        }
        groups.sort_by_key(|group| (std::cmp::Reverse(group.count), group.refusal.of_many()));
        Self(groups)
    }

    pub(super) fn count(&self) -> usize {
        self.0.iter().map(|group| group.count).sum()
    }

    /// Returns the refusals of the workers or groups.
    #[cfg(test)]
    pub(crate) fn reasons(&self) -> Vec<&Refusal> {
        self.0.iter().map(|group| &group.refusal).collect()
    }

    /// Returns one entry for each worker, with its name. For many workers, returns one entry for
    /// each reason, with their number.
    pub(crate) fn entries(&self) -> Vec<(String, String)> {
        let few = self.count() <= MAX_LISTED;
        let mut entries = Vec::new();
        for group in &self.0 {
            if few {
                entries.extend(group.names.iter().map(|name| (name.clone(), group.refusal.to_string())));
            } else {
                let more = if group.count > group.names.len() { ", …" } else { "" };
                let subject = match group.count {
                    1 => group.names.join(""),
                    count => format!("{count} workers ({}{more})", group.names.join(", ")),
                };
                let reason =
                    if group.count == 1 { group.refusal.to_string() } else { group.refusal.of_many() };
                entries.push((subject, reason));
            }
        }
        entries
    }

    /// Returns the distinct codes.
    pub(crate) fn codes(&self) -> BTreeSet<&'static str> {
        self.0.iter().map(|group| group.refusal.code()).collect()
    }

    /// Returns the entries as lines.
    pub(crate) fn lines(&self) -> Vec<String> {
        if self.0.is_empty() {
            return vec!["no worker has registered yet".to_owned()];
        }
        self.entries().into_iter().map(|(subject, reason)| format!("{subject}: {reason}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_formatted_for_people() {
        let requested = Resources { cpu_millis: 1500, memory_bytes: 3 << 29, disk_bytes: 0 };
        assert_eq!(requested.words(), ["1.5 cores", "1.5 GiB of memory"]);
        let words = [1, 50, 1000, 2000, 10_250].map(cores);
        assert_eq!(words, ["0.001 cores", "0.05 cores", "1 core", "2 cores", "10.25 cores"]);
    }

    #[test]
    fn many_refusals_are_grouped_by_reason() {
        let full = |n: u32| (format!("w{n:03}"), Refusal::Full { active: n, max: n });
        assert_eq!(
            Refusals::of([full(2), full(1)]).lines(),
            ["w001: is full (1 of 1 tasks)", "w002: is full (2 of 2 tasks)"]
        );
        let many = (0..500).map(full).chain([("odd".to_owned(), Refusal::Cordoned)]);
        assert_eq!(
            Refusals::of(many).lines(),
            ["500 workers (w000, w001, w002, …): are full".to_owned(), "odd: is cordoned".to_owned()]
        );
        assert_eq!(Refusals::default().lines(), ["no worker has registered yet"]);
    }
}
