//! Whole numbers of the command line, variables and the configuration file.

use std::ops::RangeInclusive;

/// Returns a parser of whole numbers of a range, for clap. A mistake is explained by the range, whatever the value is:
/// a negative number, one that is too large, or no number.
pub fn whole<T>(range: RangeInclusive<u64>) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static
where
    T: TryFrom<u64> + Clone + Send + Sync + 'static,
{
    move |text: &str| {
        let number = text.parse::<u64>().ok().filter(|number| range.contains(number));
        let (least, most) = (range.start(), range.end());
        number
            .and_then(|number| T::try_from(number).ok())
            .ok_or_else(|| format!("it must be a whole number from {least} to {most}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_out_of_the_range_is_explained_by_it() {
        let parse = whole::<u16>(2..=60_000);
        assert_eq!((parse("2"), parse("60000")), (Ok(2), Ok(60_000)));
        let reason = "it must be a whole number from 2 to 60000";
        for text in ["-5", "1", "60001", "65536", "18446744073709551616", "1.5", "two", ""] {
            assert_eq!(parse(text), Err(reason.to_owned()), "{text:?}");
        }
    }
}
