//! Splits a batch by the core that owns each item, and joins the answers in the order of the questions.

/// Which part each item of a batch went to. Made by `split`, used up by `join`.
#[derive(Debug)]
pub struct Order(Vec<u16>);

/// Sends each item to the part that `part_of` names (below `parts`), in order. Parts may be empty.
pub fn split<T>(items: Vec<T>, parts: usize, part_of: impl Fn(&T) -> usize) -> (Order, Vec<Vec<T>>) {
    assert!(parts <= usize::from(u16::MAX), "{parts} parts do not fit the order");
    let order: Vec<u16> = items.iter().map(|item| part_of(item) as u16).collect();
    let mut lens = vec![0usize; parts];
    for &part in &order {
        lens[usize::from(part)] += 1;
    }
    let mut split: Vec<Vec<T>> = lens.into_iter().map(Vec::with_capacity).collect();
    for (item, &part) in items.into_iter().zip(&order) {
        split[usize::from(part)].push(item);
    }
    (Order(order), split)
}

/// Puts the answers of each part back in the order of the batch. `None` when a part has not answered each of its
/// items exactly once.
pub fn join<R>(order: Order, answers: Vec<Vec<R>>) -> Option<Vec<R>> {
    let mut answers: Vec<_> = answers.into_iter().map(Vec::into_iter).collect();
    let joined: Option<Vec<R>> = order.0.iter().map(|&part| answers.get_mut(usize::from(part))?.next()).collect();
    joined.filter(|_| answers.iter().all(|rest| rest.len() == 0))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Goal: whatever the batch, each item reaches its own part, in order, and its answer comes back in its place.
        /// Method: random batches; the answer is the item itself.
        #[test]
        fn join_undoes_split(items in proptest::collection::vec(any::<u32>(), 0..300), parts in 1usize..20) {
            let (order, split) = split(items.clone(), parts, |&item| item as usize % parts);
            prop_assert_eq!(split.len(), parts);
            for (part, part_items) in split.iter().enumerate() {
                let expected: Vec<u32> = items.iter().copied().filter(|&item| item as usize % parts == part).collect();
                prop_assert_eq!(part_items, &expected);
            }
            prop_assert_eq!(join(order, split), Some(items));
        }

        /// Goal: a part that answers too little or too much is noticed. Method: one answer more or fewer in one part.
        #[test]
        fn a_wrong_count_is_noticed(items in proptest::collection::vec(any::<u32>(), 1..50), more: bool) {
            let (order, mut split) = split(items, 4, |&item| item as usize % 4);
            let part = split.iter_mut().find(|part| !part.is_empty()).expect("the batch has an item");
            if more {
                part.push(0);
            } else {
                part.pop();
            }
            prop_assert_eq!(join(order, split), None);
        }
    }
}
