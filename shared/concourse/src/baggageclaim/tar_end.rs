//! Where a tar archive ends.

/// Follows an archive from header to header, to know its end from two blocks of zeros inside a file.
pub(super) struct TarEnd {
    state: State,
    block: Vec<u8>,
    /// The size that an extended header gives the next entry.
    next_size: Option<u64>,
    extended: Vec<u8>,
}

enum State {
    Header,
    /// One block of zeros has been seen.
    MaybeEnd,
    /// More of the map of a sparse file, then its data.
    Sparse(u64),
    /// Bytes of an entry with their padding; of the first number a copy is kept.
    Data {
        keep: usize,
        left: u64,
    },
    Ended,
}

const BLOCK: usize = 512;
/// Extended headers hold a few names and numbers.
const MOST_EXTENDED: u64 = 1 << 20;

/// Not a tar archive, or one followed by something else.
#[derive(Debug)]
pub(super) struct Broken(pub(super) &'static str);

impl TarEnd {
    pub(super) fn new() -> Self {
        Self { state: State::Header, block: Vec::with_capacity(BLOCK), next_size: None, extended: Vec::new() }
    }

    /// Whether the archive is complete.
    pub(super) fn ended(&self) -> bool {
        matches!(self.state, State::Ended)
    }

    pub(super) fn push(&mut self, mut bytes: &[u8]) -> Result<(), Broken> {
        while !bytes.is_empty() {
            match &mut self.state {
                State::Ended => {
                    let padding = bytes.iter().all(|byte| *byte == 0);
                    return padding.then_some(()).ok_or(Broken("something follows the end of the archive"));
                }
                State::Data { keep, left } => {
                    let taken = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
                    let kept = taken.min(*keep);
                    self.extended.extend_from_slice(&bytes[..kept]);
                    *keep -= kept;
                    *left -= taken as u64;
                    bytes = &bytes[taken..];
                    if *left == 0 {
                        self.entry_done();
                    }
                }
                State::Header | State::MaybeEnd | State::Sparse(_) => {
                    let taken = (BLOCK - self.block.len()).min(bytes.len());
                    self.block.extend_from_slice(&bytes[..taken]);
                    bytes = &bytes[taken..];
                    if self.block.len() == BLOCK {
                        self.read_block()?;
                        self.block.clear();
                    }
                }
            }
        }
        Ok(())
    }

    fn read_block(&mut self) -> Result<(), Broken> {
        if let State::Sparse(size) = self.state {
            if self.block[504] == 0 {
                self.data(size, false);
            }
            return Ok(());
        }
        if self.block.iter().all(|byte| *byte == 0) {
            self.state = if matches!(self.state, State::MaybeEnd) { State::Ended } else { State::MaybeEnd };
            return Ok(());
        }
        // GNU tar, too, takes a lone block of zeros for a mistake, but no sender of ours makes one.
        if matches!(self.state, State::MaybeEnd) {
            return Err(Broken("a single block of zeros between entries"));
        }
        let field = self.block[148..156].to_vec();
        let sum: u64 = self.block.iter().map(|byte| u64::from(*byte)).sum::<u64>()
            - field.iter().map(|byte| u64::from(*byte)).sum::<u64>()
            + 8 * u64::from(b' ');
        if number(&field) != Some(sum) {
            return Err(Broken("a header with a wrong sum"));
        }
        let size = number(&self.block[124..136]).ok_or(Broken("a header without a size"))?;
        match self.block[156] {
            b'x' if size > MOST_EXTENDED => return Err(Broken("an extended header that is too large")),
            b'x' => self.data(size, true),
            b'g' | b'L' | b'K' => self.data(size, false),
            // Links, devices, directories and pipes have no contents, whatever they say.
            b'1'..=b'6' => {
                self.next_size = None;
                self.state = State::Header;
            }
            b'S' if self.block[482] != 0 => self.state = State::Sparse(size),
            _ => {
                let size = self.next_size.take().unwrap_or(size);
                self.data(size, false);
            }
        }
        Ok(())
    }

    fn data(&mut self, size: u64, keep: bool) {
        self.extended.clear();
        let keep = if keep { size as usize } else { 0 };
        match size.checked_next_multiple_of(BLOCK as u64).unwrap_or(u64::MAX) {
            0 => self.state = State::Header,
            left => self.state = State::Data { keep, left },
        }
    }

    fn entry_done(&mut self) {
        self.state = State::Header;
        let mut records = &self.extended[..];
        // `27 size=12345678901\n`: its own length, a name and a value.
        while let Some(space) = records.iter().position(|byte| *byte == b' ') {
            let length = std::str::from_utf8(&records[..space]).ok().and_then(|text| text.parse().ok());
            let Some(length) = length.filter(|length| (space + 1..=records.len()).contains(length)) else {
                return;
            };
            let record = std::str::from_utf8(&records[space + 1..length]).unwrap_or_default();
            if let Some(size) = record.trim_end().strip_prefix("size=") {
                self.next_size = size.parse().ok();
            }
            records = &records[length..];
        }
    }
}

/// A number in octal, or in base 256 when the first bit is set.
fn number(field: &[u8]) -> Option<u64> {
    if field[0] & 0x80 != 0 {
        let mut rest = field[1..].iter();
        return rest.try_fold(u64::from(field[0] & 0x7f), |sum, byte| {
            sum.checked_mul(256)?.checked_add(u64::from(*byte))
        });
    }
    let text = std::str::from_utf8(field).ok()?.trim_matches(['\0', ' ']);
    if text.is_empty() { Some(0) } else { u64::from_str_radix(text, 8).ok() }
}
