//! A line: workers that are alike, by id, so that one more or less is cheap however many they are.
//!
//! It is cut into pieces, each in order and all in order, so that to put one in moves few others. Invariant: no piece is empty or has more than
//! [`LONG`], and two neighbours have more than [`SHORT`] together.

use domain::WorkerId;

/// A piece that gets longer than this is cut in two.
const LONG: usize = 256;

/// Two pieces that have no more than this together become one.
const SHORT: usize = 96;

/// Places of workers, by the ids of those.
#[derive(Debug, Default)]
pub(super) struct Line {
    pieces: Vec<Vec<(WorkerId, usize)>>,
    len: usize,
}

impl Line {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn first(&self) -> Option<WorkerId> {
        self.pieces.first()?.first().map(|(id, _)| *id)
    }

    /// The places, in the order of the ids.
    pub(super) fn places(&self) -> impl Iterator<Item = &usize> + Clone {
        self.pieces.iter().flatten().map(|(_, place)| place)
    }

    /// The place of one of them, by its number in that order.
    pub(super) fn nth(&self, mut number: usize) -> Option<usize> {
        for piece in &self.pieces {
            match piece.get(number) {
                Some((_, place)) => return Some(*place),
                None => number -= piece.len(),
            }
        }
        None
    }

    /// Puts a worker in that is not there.
    pub(super) fn put(&mut self, id: WorkerId, place: usize) {
        let piece = self.piece_of(id);
        let Some(of) = self.pieces.get_mut(piece) else {
            self.pieces.push(vec![(id, place)]);
            self.len = 1;
            return;
        };
        let Err(at) = of.binary_search_by_key(&id, |(id, _)| *id) else { return };
        of.insert(at, (id, place));
        self.len += 1;
        if of.len() > LONG {
            let upper = of.split_off(of.len() / 2);
            self.pieces.insert(piece + 1, upper);
        }
    }

    /// Takes a worker out, if it is there.
    pub(super) fn take(&mut self, id: WorkerId) {
        let piece = self.piece_of(id);
        let Some(of) = self.pieces.get_mut(piece) else { return };
        let Ok(at) = of.binary_search_by_key(&id, |(id, _)| *id) else { return };
        of.remove(at);
        self.len -= 1;
        let length = |piece: usize| self.pieces.get(piece).map_or(usize::MAX, Vec::len);
        let (own, before) = (length(piece), piece.checked_sub(1));
        if own == 0 {
            self.pieces.remove(piece);
            self.join(piece.checked_sub(1));
        } else if own.saturating_add(length(piece + 1)) <= SHORT {
            self.join(Some(piece));
        } else if before.is_some_and(|before| length(before) + own <= SHORT) {
            self.join(before);
        }
    }

    /// Makes one of a piece and the next, if they are short.
    fn join(&mut self, piece: Option<usize>) {
        let Some(piece) = piece.filter(|piece| piece + 1 < self.pieces.len()) else { return };
        if self.pieces[piece].len() + self.pieces[piece + 1].len() <= SHORT {
            let mut next = self.pieces.remove(piece + 1);
            self.pieces[piece].append(&mut next);
        }
    }

    /// The piece in which an id is, or would be.
    fn piece_of(&self, id: WorkerId) -> usize {
        let starts_before =
            |piece: &Vec<(WorkerId, usize)>| piece.first().is_some_and(|(first, _)| *first <= id);
        self.pieces.partition_point(starts_before).saturating_sub(1)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};
    use uuid::Uuid;

    use super::*;

    /// The same as a plain sorted map, and the pieces as they shall be, while it grows and shrinks.
    #[test]
    fn a_line_is_a_sorted_map_in_pieces() {
        let mut dice = StdRng::seed_from_u64(7);
        for most in [3_u32, 100, 5_000] {
            let (mut line, mut map) = (Line::default(), BTreeMap::new());
            let mut pieces = 0;
            for step in 0..8 * most {
                // Grows first, and shrinks at last.
                let id = WorkerId::from_uuid(Uuid::from_u128(dice.random_range(0..most).into()));
                let puts = dice.random_range(0..8 * most) >= step;
                match (map.contains_key(&id), puts) {
                    (false, true) => {
                        let place = usize::try_from(step).expect("few");
                        line.put(id, place);
                        map.insert(id, place);
                    }
                    (true, false) => {
                        line.take(id);
                        map.remove(&id);
                    }
                    (true, true) => line.put(id, 0),
                    (false, false) => line.take(id),
                }
                pieces = Ord::max(pieces, line.pieces.len());
                assert_eq!((line.len(), line.is_empty()), (map.len(), map.is_empty()));
                assert_eq!(line.first(), map.keys().next().copied());
                let are_right = line.pieces.iter().all(|piece| (1..=LONG).contains(&piece.len()))
                    && line.pieces.windows(2).all(|two| two[0].len() + two[1].len() > SHORT);
                assert!(are_right, "{:?}", line.pieces.iter().map(Vec::len).collect::<Vec<_>>());
            }
            assert!(line.places().eq(map.values()));
            assert_eq!(pieces > 1, most > u32::try_from(LONG).expect("few"));
        }
    }
}
